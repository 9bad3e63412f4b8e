"""rms_norm as operators: without a residual, and with one, which work in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....contracts.binding import Bound, OperatorPlace, put

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OPERATORS"]


def _plain(op: Bound) -> Bound:
    def kernel(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
        put(result, op(input, None, weight, epsilon))

    return kernel


def _plain_native(replaced: Bound) -> Bound:
    def rms_norm(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> Tensor:
        result = x.new_empty(x.shape)
        replaced(result, x, weight, epsilon)
        return result

    return rms_norm


def _fused(op: Bound) -> Bound:
    def kernel(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
        put((input, residual), op(input, residual, weight, epsilon))

    return kernel


def _fused_native(replaced: Bound) -> Bound:
    def rms_norm(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> Any:
        replaced(x, residual, weight, epsilon)
        return x, residual

    return rms_norm


OPERATORS = (
    # vLLM's CUDA build, and its CPU one.
    *(
        OperatorPlace("_C::rms_norm", (target, "input", "weight", "epsilon"), _plain, _plain_native)
        for target in ("result", "out")
    ),
    OperatorPlace(
        "_C::fused_add_rms_norm",
        ("input", "residual", "weight", "epsilon"),
        _fused,
        _fused_native,
        grants=("x", "residual"),
    ),
)
