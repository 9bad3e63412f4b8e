"""Whether a traced form can be part of a compiled graph: the graph serves any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from vllm_fl.contracts import OpSpec
from vllm_fl.engine.traced import functional
from vllm_fl.plugins.types import OpImpl
from vllm_fl.text import quote


def trial(impl: OpImpl, spec: OpSpec, args: Sequence[Any]) -> str:
    """Why the traced form cannot stand in a graph for any number of tokens, or nothing.

    One that asks for the number as an integer, as `len` does, or branches on it, would be fixed to
    that of the first compilation, and launched for it with every other.

    Args:
        impl, spec: the implementation, and its op's contract.
        args: a call of it with several tokens.
    """
    assert impl.traced is not None
    unknowns = ShapeEnv()
    with FakeTensorMode(shape_env=unknowns) as mode:
        fakes = [
            _without_memory(mode, arg, spec.has_rows(name, arg))
            for name, arg in spec.named(args).items()
        ]
        tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
        known = len(unknowns.guards)

        def code(*given: torch.Tensor) -> Any:
            left = iter(given)
            own = [next(left).clone() if isinstance(fake, torch.Tensor) else fake for fake in fakes]
            assert impl.traced is not None
            return impl.traced(*own)

        try:
            make_fx(functional(code))(*tensors)
        except Exception as error:  # it may raise anything
            return f"its traced form cannot be traced: {quote(error)}"
    if unknowns.replacements or len(unknowns.guards) > known:
        fixed = [str(guard.expr) for guard in unknowns.guards[known:]]
        fixed += [f"{symbol} = {value}" for symbol, value in unknowns.replacements.items()]
        return (
            "its traced form depends on the number of tokens, which a graph serves many of: "
            f"{', '.join(fixed)} (take shape[0] instead of len, and no branch on it)"
        )
    return ""


def _without_memory(mode: FakeTensorMode, arg: Any, has_tokens: bool) -> Any:
    """The argument as a graph has it; of one with a row for each token their number is unknown."""
    if not isinstance(arg, torch.Tensor):
        return arg
    sizes = [DimDynamic.STATIC] * arg.ndim
    if has_tokens:
        sizes[0] = DimDynamic.DUCK
    return mode.from_tensor(arg, symbolic_context=StatelessSymbolicContext(sizes))
