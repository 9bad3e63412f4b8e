"""Operators that leave a gated activation of `input` in a tensor of the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...contracts.binding import Bound, OperatorPlace, put

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gated"]


def gated(name: str, parameters: tuple[str, ...], *given: Any) -> OperatorPlace:
    """The place of an op (x, `given`, numbers) in an operator (out, input, numbers).

    Args:
        name: the operator, as `_C::silu_and_mul`.
        parameters: the operator's.
        given: what the operator stands for of the contract's parameters behind x. Those behind
            these are the operator's own numbers.
    """

    def route(op: Bound) -> Bound:
        def kernel(out: Tensor, input: Tensor, *numbers: Any) -> None:
            put(out, op(input, *given, *numbers))

        return kernel

    def native(replaced: Bound) -> Bound:
        def op(x: Tensor, *further: Any) -> Tensor:
            out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
            replaced(out, x, *further[len(given) :])
            return out

        return op

    return OperatorPlace(name, parameters, route, native)
