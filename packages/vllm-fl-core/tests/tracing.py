"""Graphs like those that vLLM gives to its compiler passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


@contextmanager
def traced(
    function: Callable[..., Any], args: Sequence[torch.Tensor], unknown: Sequence[bool]
) -> Iterator[tuple[FakeTensorMode, Any]]:
    """Trace a function; yield (mode of its fake tensors, module with the graph).

    Args:
        function: the function to trace.
        args: its arguments.
        unknown: per argument, whether its first size is symbolic in the graph.
    """
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.no_grad():
        fakes = [
            mode.from_tensor(
                arg,
                static_shapes=False,
                symbolic_context=StatelessSymbolicContext(
                    dynamic_sizes=[DimDynamic.DYNAMIC if rows else DimDynamic.STATIC]
                    + [DimDynamic.STATIC] * (arg.ndim - 1)
                ),
            )
            for arg, rows in zip(args, unknown, strict=True)
        ]
        yield mode, make_fx(function)(*fakes)
