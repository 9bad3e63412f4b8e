"""Where vLLM runs `quant_int8`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, OperatorPlace, put
from vllm_fl.contracts.sizes import HIDDEN, INTERMEDIATE

from ._models import is_quantised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _to_static(op: Bound) -> Bound:
    def kernel(out: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
        put(out, op(input.flatten(0, -2), scale, azp)[0].view(out.shape))

    return kernel


def _to_dynamic(op: Bound) -> Bound:
    def kernel(out: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
        rows = input.flatten(0, -2)
        if azp is None:
            value, steps = op(rows)
            put((out, scale), (value.view(out.shape), steps.view(scale.shape)))
        else:
            value, steps, zero = op(rows, None, None, True)
            results = (value.view(out.shape), steps.view(scale.shape), zero.view(azp.shape))
            put((out, scale, azp), results)

    return kernel


def _from_static(replaced: Bound) -> Bound:
    def quant_int8(
        x: Tensor,
        scale: Tensor,
        azp: Tensor | None = None,
        asymmetric: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        out = x.new_empty(x.shape, dtype=torch.int8)
        replaced(out, x.contiguous(), scale, azp)
        return out, scale

    return quant_int8


def _from_dynamic(replaced: Bound) -> Bound:
    def quant_int8(
        x: Tensor,
        scale: Tensor | None = None,
        azp: Tensor | None = None,
        asymmetric: bool | None = None,
    ) -> tuple[Tensor, ...]:
        import torch

        out = x.new_empty(x.shape, dtype=torch.int8)
        steps = x.new_empty((x.shape[0], 1), dtype=torch.float32)
        zero = steps.new_empty(steps.shape, dtype=torch.int32) if asymmetric else None
        replaced(out, x.contiguous(), steps, zero)
        return (out, steps) if zero is None else (out, steps, zero)

    return quant_int8


def _to_function(op: Bound) -> Bound:
    def per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
        value, steps = op(x.reshape(-1, x.shape[-1]))
        return value.view(x.shape), steps.view(*x.shape[:-1], 1)

    return per_token_quant_int8


def _from_function(replaced: Bound) -> Bound:
    def quant_int8(
        x: Tensor,
        scale: Tensor | None = None,
        azp: Tensor | None = None,
        asymmetric: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = replaced(x)
        return pair

    return quant_int8


_OPERATORS = tuple(
    # vLLM's CUDA build calls what is written `result`, its CPU build `out`.
    OperatorPlace(f"_C::{name}", (target, "input", "scale", "azp"), route, native)
    for name, route, native in (
        ("static_scaled_int8_quant", _to_static, _from_static),
        ("dynamic_scaled_int8_quant", _to_dynamic, _from_dynamic),
    )
    for target in ("result", "out")
)
_LAYERS = "vllm.model_executor.layers"

BINDING = Binding(
    places=(
        *_OPERATORS,
        # Triton's, of int8 experts and of Marlin with int8 activations.
        FunctionPlace(
            (
                f"{_LAYERS}.quantization.utils.int8_utils.per_token_quant_int8",
                f"{_LAYERS}.quantization.utils.marlin_utils.per_token_quant_int8",
                f"{_LAYERS}.fused_moe.utils.per_token_quant_int8",
            ),
            ("x",),
            _to_function,
            _from_function,
        ),
    ),
    sizes=(HIDDEN, INTERMEDIATE),
    not_reached=(
        "groups of features with a scale each (per_token_group_quant_int8)",
        "quantisation inside another kernel: after a norm, or in a matrix product",
    ),
    when=is_quantised,
    formerly=("dynamic_per_token_quant_int8",),
)
