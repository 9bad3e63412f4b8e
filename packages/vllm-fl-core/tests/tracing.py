"""Graphs and configurations like those that vLLM gives to its compiler passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from builders import engine_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from vllm.config import CompilationMode

from vllm_fl.engine.plan import Plan
from vllm_fl.integration.carried import Carried
from vllm_fl.integration.graphs.state import InGraphs
from vllm_fl.integration.patchers import fusions

OP, LARGEST = "linear", 64
ROWS = {"<=16": "vendor", "rest": "stock"}

PATCHER = fusions.OperatorsInGraphs()


def config(ends: list[int] | None, sizes: list[int] | None = None, **fields: Any) -> Any:
    fields = {"mode": CompilationMode.VLLM_COMPILE, "backend": "inductor", **fields}
    fields.setdefault("cudagraph_capture_sizes", [])
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            compile_ranges_endpoints=ends, compile_sizes=sizes, **fields
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=LARGEST),
        additional_config={"vllm_fl": Carried(plan="0123")},
    )


def applied(plan: Plan) -> Any:
    """The engine of a plan that is applied, with counts reset."""
    engine = engine_of(plan)
    engine.state.pop(InGraphs, None)
    PATCHER.apply(engine)
    return engine


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
