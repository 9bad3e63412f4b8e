"""Run code on graph tensors that have several symbols for the number of tokens.

Graph inputs that no traced operation has combined have different symbols, but each is vLLM's number
of tokens. If two symbols are unified while a graph is compiled, the graph loses an input, and
loading it from vLLM's cache fails with an IndexError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def under_one(code: Callable[..., Any], values: Sequence[Any], results: Any) -> Any:
    """Run code that replaces an operator, with one symbol for the number of tokens. If possible,
    the symbol is from the operator's results. The returned results have the symbols of the graph:
    later nodes would otherwise unify symbols when the compiler traces the graph again. `code`
    returns values in the structure of `results`.

    Raises:
        ValueError: a size or stride is an expression with a different symbol, or a result has a
            symbol that no argument has.
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
        sizes, strides = ([*map(number, of)] for of in (value.shape, value.stride()))
        return torch.as_strided(value, sizes, strides)

    def to_one(number: Any) -> Any:
        if not isinstance(number, torch.SymInt) or number.node.expr.free_symbols <= {one}:
            return number
        if _symbol(number) is None:
            raise ValueError(f"the stride {number} is not a single symbol")
        return known[one]

    def as_before(result: Any, was: Any) -> Any:
        apart = others(was)
        if not apart:
            return result
        if len(apart) > 1 or not apart <= {*known}:
            raise ValueError(f"a result of shape {[*was.shape]} has symbols that no argument has")
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
    """Return the symbol of a size, or None for a number or an expression."""
    is_unknown = isinstance(size, torch.SymInt) and size.node.expr.is_symbol
    return size.node.expr if is_unknown else None
