"""The number of tokens in a graph, where several unknowns stand for it.

Inputs that no traced operation has joined have unknowns of their own, though each is vLLM's number
of tokens. vLLM has one table of unknowns for all of a model's graphs, and stores it with what it
has compiled: two that are joined while a graph is compiled are one input less to who loads that
graph later, which then ends in an IndexError. Code that we put into a graph must join none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def under_one(code: Callable[..., Any], values: Sequence[Any], results: Any) -> Any:
    """What code in an operator's place returns, in whose arguments one unknown stands for all.

    That is one of the operator's results, which keep the unknowns that they have in the graph: what
    follows there, and is traced again when the graph is compiled, would join others with them.

    Args:
        code: takes the arguments, and returns tensors and others in the structure of `results`.
        values: the operator's arguments: tensors of a graph, and others.
        results: what the operator returns, as the graph has it.

    Raises:
        ValueError: a size or a stride is no unknown and no number, as of two unknowns together; or
            a result has an unknown that no argument has.
    """
    known = {_symbol(size): size for value in values for size in _sizes(value)}
    known.pop(None, None)
    if len(known) < 2:
        return code(*values)
    before = pytree.tree_leaves(results)
    kept = [_symbol(size) for result in before for size in _sizes(result)]
    one = next((symbol for symbol in kept if symbol in known), next(iter(known)))

    def others(value: Any) -> set[Any]:
        return {_symbol(size) for size in _sizes(value)} - {None, one}

    def sized(value: Any, number: Callable[[Any], Any]) -> Any:
        """The tensor's memory in the sizes of which `number` makes its own."""
        sizes, strides = ([*map(number, of)] for of in (value.shape, value.stride()))
        return torch.as_strided(value, sizes, strides)

    def to_one(number: Any) -> Any:
        if not isinstance(number, torch.SymInt) or number.node.expr.free_symbols <= {one}:
            return number
        if _symbol(number) is None:
            raise ValueError(f"a stride of {number}, which is no unknown of its own")
        return known[one]

    def as_before(result: Any, was: Any) -> Any:
        apart = others(was)
        if not apart:
            return result
        if len(apart) > 1 or not apart <= {*known}:
            raise ValueError(f"a result of {[*was.shape]}, of unknowns that no argument has")
        (other,) = apart
        return sized(result, lambda n: known[other] if _symbol(n) == one else n)

    given = (sized(value, to_one) if others(value) else value for value in values)
    found, structure = pytree.tree_flatten(code(*given))
    return pytree.tree_unflatten(
        [as_before(*pair) for pair in zip(found, before, strict=True)], structure
    )


def _sizes(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _symbol(size: Any) -> Any:
    """The unknown that a size is; None for a number, or for what is computed of unknowns."""
    is_unknown = isinstance(size, torch.SymInt) and size.node.expr.is_symbol
    return size.node.expr if is_unknown else None
