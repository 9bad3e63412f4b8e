"""Products of fp8 matrices, on vLLM's CUTLASS kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability

from . import capability, implementation, kernel, packed

__all__ = ["OPS", "linear_fp8"]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

LEAST = (8, 9)
"""Lowest compute capability with fp8 products."""

PIECE = 16
"""The numbers of input and output features must be multiples of this."""


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (weight * weight_scale).T + bias, rounded once."""
    result = x.new_empty((x.shape[0], weight.shape[0]), dtype=DTYPES[out_dtype])
    if result.numel():  # an empty grid is a launch error
        scales = x_scale.contiguous(), weight_scale.contiguous()
        added = bias if bias is None else packed(bias)
        kernel("cutlass_scaled_mm")(result, packed(x), packed(weight).t(), *scales, added)
    return result


def _has_products(x: torch.Tensor) -> Availability:
    return capability(x.device) >= LEAST or "fp8 products need compute capability 8.9 or higher"


OPS = (
    implementation(
        linear_fp8,
        "cutlass_scaled_mm",
        takes=(f"in_features % {PIECE} == 0 and out_features % {PIECE} == 0", _has_products),
    ),
)
