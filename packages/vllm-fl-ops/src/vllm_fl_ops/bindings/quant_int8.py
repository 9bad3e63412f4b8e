"""Binding of `quant_int8`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionTarget, OperatorTarget, Route

from ..contracts.rules import HIDDEN, INTERMEDIATE
from ._models import is_quantised

if TYPE_CHECKING:
    from torch import Tensor


def _steps(x: Tensor) -> Tensor:
    import torch

    return x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _zero_points(x: Tensor, asymmetric: bool | None) -> Tensor | None:
    import torch

    return x.new_empty((x.shape[0], 1), dtype=torch.int32) if asymmetric else None


def _shaped(
    results: tuple[Tensor, ...], input: Tensor, scale: Tensor, azp: Tensor | None
) -> tuple[Tensor, ...]:
    """The results in the operator's shapes."""
    value, steps, *zero = results
    zero_points = [] if azp is None else [zero[0].view(azp.shape)]
    return value.view(input.shape), steps.view(scale.shape), *zero_points


def _operator(name: str, target: str, route: Route) -> OperatorTarget:
    return OperatorTarget(f"_C::{name}_scaled_int8_quant", (target, "input", "scale", "azp"), route)


def _static(target: str) -> OperatorTarget:
    route = Route(
        args={"x": lambda input: input.flatten(0, -2)},
        out=target,
        results=lambda results, input: results[0].view(input.shape),
        own_args={"input": lambda x: x.contiguous()},
        own_results=lambda value, scale: (value, scale),
    )
    return _operator("static", target, route)


def _dynamic(target: str) -> OperatorTarget:
    route = Route(
        args={
            "x": lambda input: input.flatten(0, -2),
            "scale": lambda: None,
            "azp": lambda: None,
            "asymmetric": lambda azp: None if azp is None else True,
        },
        out=(target, "scale", "azp"),
        results=_shaped,
        own_args={
            "input": lambda x: x.contiguous(),
            "scale": _steps,
            "azp": _zero_points,
        },
        own_results=lambda results: results[:2] if results[2] is None else results,
    )
    return _operator("dynamic", target, route)


_LAYERS = "vllm.model_executor.layers"

BINDING = Binding(
    targets=(
        # The output parameter is `result` in vLLM's CUDA build, and `out` in its CPU build.
        *(made(out) for made in (_static, _dynamic) for out in ("result", "out")),
        # The Triton kernel of int8 experts, and of Marlin with int8 activations.
        FunctionTarget(
            (
                f"{_LAYERS}.quantization.utils.int8_utils.per_token_quant_int8",
                f"{_LAYERS}.quantization.utils.marlin_utils.per_token_quant_int8",
                f"{_LAYERS}.fused_moe.utils.per_token_quant_int8",
            ),
            ("x",),
            Route(
                args={"x": lambda x: x.reshape(-1, x.shape[-1])},
                results=lambda results, x: (
                    results[0].view(x.shape),
                    results[1].view(*x.shape[:-1], 1),
                ),
                own_args={"x": lambda x: x},
            ),
        ),
    ),
    sizes=(HIDDEN, INTERMEDIATE),
    not_reached=(
        "groups of features with one scale each (per_token_group_quant_int8)",
        "quantisation inside another kernel: after a norm, or in a matrix product",
    ),
    when=is_quantised,
    formerly=("dynamic_per_token_quant_int8",),
)
