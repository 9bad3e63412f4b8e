"""Where vLLM runs `quant_fp8_group`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, OperatorPlace, put
from vllm_fl.contracts.sizes import HIDDEN, INTERMEDIATE

from ._models import is_quantised

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["BINDING"]


def _to_operator(op: Bound) -> Bound:
    def kernel(
        input: Tensor,
        output_q: Tensor,
        output_s: Tensor,
        group_size: int,
        eps: float,
        fp8_min: float,
        fp8_max: float,
        scale_ue8m0: bool,
        *layout: bool,
    ) -> Any:
        import torch

        rows = input.flatten(0, -2)
        shape = (rows.shape[0], rows.shape[1] // group_size)
        if (fp8_min, fp8_max) != (-448.0, 448.0) or output_q.dtype != torch.float8_e4m3fn:
            return NotImplemented
        if output_s.shape != shape:  # or its layout would have to be guessed
            return NotImplemented
        value, steps = op(rows, group_size, eps, scale_ue8m0)
        return put((output_q, output_s), (value.view(output_q.shape), steps))

    return kernel


def _from_operator(count: int) -> Callable[[Bound], Bound]:
    """For an operator of so many parameters: behind the first eight come flags of the layout."""

    def native(replaced: Bound) -> Bound:
        def quant_fp8_group(
            x: Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
        ) -> tuple[Tensor, Tensor]:
            import torch

            value = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
            steps = x.new_empty((x.shape[0], x.shape[1] // group_size), dtype=torch.float32)
            args = (x.contiguous(), value, steps, group_size, eps, -448.0, 448.0, ue8m0)
            replaced(*args, *(False,) * (count - len(args)))
            return value, steps

        return quant_fp8_group

    return native


def _to_function(op: Bound) -> Bound:
    def per_token_group_quant_fp8(
        x: Tensor,
        group_size: int,
        eps: float = 1e-10,
        dtype: torch.dtype | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        out_q: Tensor | None = None,
        use_ue8m0: bool | None = None,
    ) -> Any:
        import torch
        from vllm.platforms import current_platform
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        found = current_platform.fp8_dtype() if dtype is None else dtype
        if tma_aligned_scales or out_q is not None or found != torch.float8_e4m3fn:
            return NotImplemented
        ue8m0 = is_deep_gemm_e8m0_used() if use_ue8m0 is None else use_ue8m0
        value, steps = op(x.flatten(0, -2), group_size, eps, bool(ue8m0))
        steps = steps.view(*x.shape[:-1], -1)
        if column_major_scales:
            steps = steps.mT.contiguous().mT
        return value.view(x.shape), steps

    return per_token_group_quant_fp8


def _from_function(replaced: Bound) -> Bound:
    def quant_fp8_group(
        x: Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
    ) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = replaced(x, group_size, eps, use_ue8m0=ue8m0)
        return pair

    return quant_fp8_group


_OPERATOR = (
    *("input", "output_q", "output_s", "group_size", "eps", "fp8_min", "fp8_max"),
    "scale_ue8m0",
)
_LAYERS = "vllm.model_executor.layers"

BINDING = Binding(
    places=(
        FunctionPlace(
            (
                # The layer QuantFP8 with groups calls it by its module, on CUDA and XPU.
                f"{_LAYERS}.quantization.utils.fp8_utils.per_token_group_quant_fp8",
                f"{_LAYERS}.fused_moe.utils.per_token_group_quant_fp8",
                f"{_LAYERS}.fused_moe.experts.deep_gemm_moe.per_token_group_quant_fp8",
                "vllm.model_executor.kernels.linear.scaled_mm.flashinfer.per_token_group_quant_fp8",
                "vllm.model_executor.models.deepseek_v2.per_token_group_quant_fp8",
            ),
            (
                *("x", "group_size", "eps", "dtype", "column_major_scales", "tma_aligned_scales"),
                *("out_q", "use_ue8m0"),
            ),
            _to_function,
            _from_function,
        ),
        # What that function calls on CUDA, in compiled code, too.
        *(
            OperatorPlace(
                "_C::per_token_group_fp8_quant", names, _to_operator, _from_operator(len(names))
            )
            for names in (
                (*_OPERATOR, "dummy_is_scale_transposed", "dummy_is_tma_aligned"),
                _OPERATOR,
            )
        ),
    ),
    sizes=(HIDDEN, INTERMEDIATE),
    not_reached=(
        "the layer QuantFP8 with groups where vLLM computes it in PyTorch: compiled without "
        "+quant_fp8, and on platforms of plugins",
        "scales packed for DeepGEMM (per_token_group_quant_fp8_packed_for_deepgemm)",
        "models in vllm/models that import the function by name: DeepSeek V3.2's, Hunyuan 4's and "
        "dots3's, where vLLM has them there",
        "groups of features in int8 (per_token_group_quant_int8), or of several tokens",
        "quantisation inside another kernel: after an activation or a norm, or of experts",
    ),
    when=is_quantised,
)
