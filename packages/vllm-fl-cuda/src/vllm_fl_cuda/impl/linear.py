"""Products of fp8, on vLLM's CUTLASS kernels."""

from __future__ import annotations

from functools import cache

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, kernel, packed, provides, unsuitable

__all__ = ["OPS", "linear_fp8", "supports_linear_fp8"]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EIGHT_BITS = frozenset({torch.float8_e4m3fn})

LEAST = (8, 9)
"""The compute capability of the first GPUs with products of fp8."""

PIECE = 16
"""Features of both sides come in so many at once."""


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (weight * weight_scale).T + bias, rounded once.

    Args:
        x: (tokens, in_features), float8_e4m3fn, of any layout.
        weight: (out_features, in_features), float8_e4m3fn, of any layout.
        x_scale: float32, (tokens, 1), or one number.
        weight_scale: float32, (out_features, 1), or one number.
        out_dtype: float16 or bfloat16.
        bias: (out_features,), of out_dtype, or None for 0.

    Returns:
        (tokens, out_features), of out_dtype.
    """
    result = x.new_empty((x.shape[0], weight.shape[0]), dtype=DTYPES[out_dtype])
    if result.numel():  # an empty grid is a launch error
        scales = x_scale.contiguous(), weight_scale.contiguous()
        added = bias if bias is None else packed(bias)
        kernel("cutlass_scaled_mm")(result, packed(x), packed(weight).t(), *scales, added)
    return result


def supports_linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: str,
    bias: torch.Tensor | None = None,
) -> Availability:
    """True, or why the kernel would fail, or read beyond an argument: it checks few shapes."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not x.shape[1]:
        return f"x and weight are {tuple(x.shape)} and {tuple(weight.shape)}"
    if x.shape[1] % PIECE or weight.shape[0] % PIECE:
        return f"the features, {tuple(weight.shape)}, are no multiples of {PIECE}"
    if out_dtype not in DTYPES:
        return f"no kernel with a result of {out_dtype}"
    for name, scale, rows in (("x_scale", x_scale, x), ("weight_scale", weight_scale, weight)):
        if scale.dtype != torch.float32 or scale.shape not in ((), (1,), (rows.shape[0], 1)):
            return f"{name} is {scale.dtype} of {tuple(scale.shape)}, for {tuple(rows.shape)}"
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != DTYPES[out_dtype]):
        return f"bias is {bias.dtype} of {tuple(bias.shape)}"
    given = {"weight": weight, "x_scale": x_scale, "weight_scale": weight_scale, "bias": bias}
    for name, value in given.items():
        if value is not None and value.device != x.device:
            return f"{name} is on {value.device}, and x on {x.device}"
    reason = unsuitable("x", x, EIGHT_BITS) or unsuitable("weight", weight, EIGHT_BITS)
    if reason or _capability(x.device) >= LEAST:
        return reason or True
    return "no products of fp8 on GPUs before compute capability 8.9"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


OPS = (
    OpImpl(
        "linear_fp8",
        *VENDOR,
        linear_fp8,
        "cuda",
        available=provides("cutlass_scaled_mm"),
        supports=supports_linear_fp8,
    ),
)
