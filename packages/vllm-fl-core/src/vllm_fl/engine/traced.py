"""Traced forms: an implementation as code that stands in a compiled graph, its kernel included.

An opaque implementation is an operator to a compiler, and a call of it runs Python and Triton's own
launching: tens of microseconds of the host, where no graph was captured. Of a traced form the
compiler sees the launch (`torch.library.wrap_triton`), and its code launches the kernel as it does
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from ..contracts import OpSpec
from ..plugins.forms import verdict_of
from ..plugins.types import OpImpl, answered
from ..text import quote


def functional(code: Callable[..., Any]) -> Callable[..., Any]:
    """`code` with results in new tensors in the place of what it writes over."""
    pure: Callable[..., Any] = torch.func.functionalize(code, remove="mutations")
    return pure


def refused(impl: OpImpl, spec: OpSpec, args: Sequence[Any]) -> str:
    """Why an implementation takes no such call; empty where it does.

    Args:
        impl, spec: the implementation, and its op's contract.
        args: the contract's arguments, as a graph has them: tensors without memory.
    """
    verdict = answered("its supports", lambda: verdict_of(impl, spec, args))
    return "" if verdict is True else verdict


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
