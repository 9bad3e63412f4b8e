"""The number of tokens in a graph, where several unknowns stand for it.

Inputs that no traced operation has joined have unknowns of their own, though each is vLLM's number
of tokens. vLLM has one table of unknowns for all of a model's graphs, and stores it with what it
has compiled: two that are joined while a graph is compiled are one input less to who loads that
graph later, which then ends in an IndexError. Code that we put into a graph must join none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

SOME = 16
"""How many tokens `as_numbers` takes: more than one, since a single row is always contiguous."""


def under_one(values: Sequence[Any]) -> list[Any]:
    """The arguments of code that takes an operator's place, all with the first one's unknown.

    Args:
        values: tensors of a graph, and others.

    Raises:
        ValueError: a stride is no unknown and no number, as of two unknowns together.
    """
    sizes = [size for value in values for size in _sizes(value) if _symbol(size) is not None]
    if len({_symbol(size) for size in sizes}) < 2:
        return list(values)
    first = sizes[0]

    def known(number: Any) -> Any:
        if not isinstance(number, torch.SymInt) or number.node.expr.is_Integer:
            return number
        if number.node.expr.free_symbols == {_symbol(first)}:
            return number
        if _symbol(number) is None:
            raise ValueError(f"a stride of {number}, which is no unknown of its own")
        return first

    return [
        torch.as_strided(value, [*map(known, value.shape)], [*map(known, value.stride())])
        if {_symbol(size) for size in _sizes(value)} - {None, _symbol(first)}
        else value
        for value in values
    ]


def as_numbers(values: Iterable[Any]) -> list[Any]:
    """Tensors without memory like those of a graph, with numbers for their unknowns.

    What a `supports` asks of them is asked of no table of unknowns, and needs no token count, since
    it must not look at it.
    """
    mode = FakeTensorMode()

    def number(size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, SOME)))

    def like(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return number(value)
        if not isinstance(value, FakeTensor):
            return value
        shape, steps = (tuple(map(number, of)) for of in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(shape, steps, dtype=value.dtype, device=value.device)

    return [like(value) for value in values]


def _sizes(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _symbol(size: Any) -> Any:
    """The unknown that a size is; None for a number, or for what is computed of unknowns."""
    is_unknown = isinstance(size, torch.SymInt) and size.node.expr.is_symbol
    return size.node.expr if is_unknown else None
