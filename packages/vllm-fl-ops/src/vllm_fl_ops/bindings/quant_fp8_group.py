"""Binding of `quant_fp8_group`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionTarget, OperatorTarget, Route

from ..contracts.rules import HIDDEN, INTERMEDIATE
from ._models import is_quantised
from ._phrases import names

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _is_plain(input: Tensor, output_q: Tensor, output_s: Tensor, group_size: int) -> bool:
    """Return whether the format is E4M3 and the scales are (rows, groups).

    Other shapes are ambiguous.
    """
    import torch

    rows, groups = input.shape[:-1].numel(), input.shape[-1] // group_size
    return output_q.dtype == torch.float8_e4m3fn and output_s.shape == (rows, groups)


def _operator(*layout: str) -> OperatorTarget:
    """The target for one release of vLLM; `layout` are parameters that its kernel does not read."""
    return OperatorTarget(
        "_C::per_token_group_fp8_quant",
        (
            *names("input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0"),
            *layout,
        ),
        Route(
            args={"x": lambda input: input.flatten(0, -2), "ue8m0": "scale_ue8m0"},
            constants={"fp8_min": -448.0, "fp8_max": 448.0},
            only=_is_plain,
            out=("output_q", "output_s"),
            results=lambda results, output_q: (results[0].view(output_q.shape), results[1]),
            own_args={
                "input": lambda x: x.contiguous(),
                **dict.fromkeys(layout, lambda: False),
            },
        ),
    )


def _is_e4m3(dtype: torch.dtype | None) -> bool:
    import torch
    from vllm.platforms import current_platform

    return (current_platform.fp8_dtype() if dtype is None else dtype) == torch.float8_e4m3fn


def _in_powers_of_two(use_ue8m0: bool | None) -> bool:
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used() if use_ue8m0 is None else use_ue8m0)


def _shaped(
    results: tuple[Tensor, Tensor], x: Tensor, column_major_scales: bool
) -> tuple[Tensor, Tensor]:
    """The results in the function's shapes and layout."""
    value, steps = results
    steps = steps.view(*x.shape[:-1], steps.shape[-1])
    if column_major_scales:
        steps = steps.mT.contiguous().mT
    return value.view(x.shape), steps


_LAYERS = "vllm.model_executor.layers"

BINDING = Binding(
    targets=(
        FunctionTarget(
            (
                # The layer QuantFP8 with groups calls it through its module, on CUDA and XPU.
                f"{_LAYERS}.quantization.utils.fp8_utils.per_token_group_quant_fp8",
                f"{_LAYERS}.fused_moe.utils.per_token_group_quant_fp8",
                f"{_LAYERS}.fused_moe.experts.deep_gemm_moe.per_token_group_quant_fp8",
                "vllm.model_executor.kernels.linear.scaled_mm.flashinfer.per_token_group_quant_fp8",
                "vllm.model_executor.models.deepseek_v2.per_token_group_quant_fp8",
            ),
            names(
                "x, group_size, eps, dtype, column_major_scales, tma_aligned_scales, out_q, "
                "use_ue8m0"
            ),
            Route(
                args={"x": lambda x: x.flatten(0, -2), "ue8m0": _in_powers_of_two},
                constants={"tma_aligned_scales": False, "out_q": None},
                only=_is_e4m3,
                results=_shaped,
                own_args={
                    "x": lambda x: x,
                    "dtype": lambda: None,
                    "column_major_scales": lambda: False,
                    "use_ue8m0": lambda ue8m0: ue8m0,
                },
            ),
        ),
        # Called by that function on CUDA, also in compiled code.
        _operator("dummy_is_scale_transposed", "dummy_is_tma_aligned"),
        _operator(),
    ),
    sizes=(HIDDEN, INTERMEDIATE),
    not_reached=(
        "the layer QuantFP8 with groups if vLLM computes it in PyTorch: compiled without "
        "+quant_fp8, and on plugin platforms",
        "scales packed for DeepGEMM (per_token_group_quant_fp8_packed_for_deepgemm)",
        "models in vllm/models that import the function by name: DeepSeek V3.2, Hunyuan 4 and "
        "dots3, in releases that have them",
        "int8 groups of features (per_token_group_quant_int8), and groups of several tokens",
        "quantisation inside another kernel: after an activation or a norm, or of experts",
    ),
    when=is_quantised,
)
