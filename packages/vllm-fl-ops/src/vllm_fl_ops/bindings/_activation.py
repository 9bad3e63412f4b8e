"""Operators that leave an activation of `input` in a tensor of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Bound, OperatorPlace, put

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SHARED", "elementwise", "gated"]

SHARED = tuple(
    f"vllm.model_executor.layers.activation:{registry}._dict"
    for registry in ("_ACTIVATION_REGISTRY", "_ACTIVATION_AND_MUL_REGISTRY")
)
"""Where vLLM keeps activations by their names."""


def elementwise(name: str) -> OperatorPlace:
    """The place of an op (x) in an operator (out, input), whose tensors are of one shape.

    Args:
        name: the operator, as `_C::gelu_new`.
    """
    return _place(name, ("out", "input"), (), lambda x: x.new_empty(x.shape))


def gated(name: str, parameters: tuple[str, ...], *given: Any) -> OperatorPlace:
    """The place of an op (x, `given`, numbers) in an operator (out, input, numbers).

    Args:
        name: the operator, as `_C::silu_and_mul`.
        parameters: the operator's.
        given: what the operator stands for of the contract's parameters behind x. Those behind
            these are the operator's own numbers.
    """
    return _place(name, parameters, given, lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))


def _place(
    name: str,
    parameters: tuple[str, ...],
    given: tuple[Any, ...],
    empty: Callable[[Tensor], Tensor],
) -> OperatorPlace:
    def route(op: Bound) -> Bound:
        def kernel(out: Tensor, input: Tensor, *numbers: Any) -> None:
            put(out, op(input, *given, *numbers))

        return kernel

    def native(replaced: Bound) -> Bound:
        def op(x: Tensor, *further: Any) -> Tensor:
            out = empty(x)
            replaced(out, x, *further[len(given) :])
            return out

        return op

    return OperatorPlace(name, parameters, route, native, tokens="input")
