"""Quantisation of activations to 8 bits, on vLLM's CUDA kernels."""

from __future__ import annotations

from functools import cache

import torch

from . import implementation, kernel, packed

__all__ = [
    "OPS",
    "quant_fp8",
    "quant_fp8_group",
    "quant_int8",
]

MOST = 448.0
"""Largest float8_e4m3fn."""

SHARED_MEMORY = 48 * 1024
"""Bytes available to a kernel by default."""

GROUPS_A_BLOCK = 16
"""Maximum groups per thread block; each is in shared memory."""


def quant_fp8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    per_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x / scale to float8_e4m3fn, saturating, computed in fp32."""
    x = packed(x)
    value = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    if scale is not None:
        if x.numel():  # an empty grid is a launch error
            kernel("static_scaled_fp8_quant")(value, x, scale)
        return value, scale.clone()
    if per_token:
        steps = x.new_empty((x.shape[0], 1), dtype=torch.float32)
        if x.numel():
            kernel("dynamic_per_token_scaled_fp8_quant")(value, x, steps, scale_ub)
        return value, steps
    if not x.numel():
        return value, x.new_full((1,), 1 / (MOST * 512), dtype=torch.float32)
    steps = x.new_empty(1, dtype=torch.float32)
    kernel("dynamic_scaled_fp8_quant")(value, x, steps)
    return value, steps


def quant_fp8_group(
    x: torch.Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x / scale of its group to float8_e4m3fn, computed in fp32.

    Scales that are powers of two (ue8m0) are at least 2^-33.
    """
    x = packed(x)
    value = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    steps = x.new_empty((x.shape[0], x.shape[1] // group_size), dtype=torch.float32)
    if x.numel():
        run = kernel("per_token_group_fp8_quant")
        flags = (False,) * _layout_flags()  # the kernel derives the layout from the scales' strides
        run(x, value, steps, group_size, eps, -MOST, MOST, ue8m0, *flags)
    return value, steps


@cache
def _layout_flags() -> int:
    """Return the number of layout flags of this release's operator: 2, or 0 in older releases."""
    return len(kernel("per_token_group_fp8_quant")._schema.arguments) - 8  # type: ignore[attr-defined]


def quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Round x / scale + azp to int8, saturating, computed in fp32; ties go to even."""
    x = packed(x)
    value = torch.empty_like(x, dtype=torch.int8)
    if scale is not None:
        if x.numel():  # an empty grid is a launch error
            kernel("static_scaled_int8_quant")(value, x, scale, azp)
        return value, scale.clone()
    steps = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    zero = torch.empty_like(steps, dtype=torch.int32) if asymmetric else None
    if x.numel():
        kernel("dynamic_scaled_int8_quant")(value, x, steps, zero)
    return (value, steps) if zero is None else (value, steps, zero)


OPS = (
    implementation(
        quant_fp8,
        "static_scaled_fp8_quant",
        "dynamic_scaled_fp8_quant",
        "dynamic_per_token_scaled_fp8_quant",
    ),
    implementation(
        quant_fp8_group,
        "per_token_group_fp8_quant",
        takes=(f"group_size * x.itemsize <= {SHARED_MEMORY // GROUPS_A_BLOCK}",),
    ),
    implementation(quant_int8, "static_scaled_int8_quant", "dynamic_scaled_int8_quant"),
)
