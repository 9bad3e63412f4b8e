"""Quantisation of activations to int8, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from . import implementation, kernel

__all__ = ["OPS", "quant_int8"]


def quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Round x / scale + azp to int8 with saturation, in fp32; halves round to even.

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16, any layout.
        scale: one float32 number; None to compute a scale per token.
        azp: one int32 number, with `scale`; None for 0.
        asymmetric: True to compute a zero point per token; not with `scale`.

    Returns:
        (value, scale), or (value, scale, azp) with `asymmetric`.

    Raises:
        RuntimeError: the kernel rejects x or scale.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    value = torch.empty(x.shape, dtype=torch.int8)
    if scale is not None:
        kernel("static_scaled_int8_quant")(value, x, scale, azp)
        return value, scale.clone()
    steps = torch.empty((x.shape[0], 1), dtype=torch.float32)
    zero = torch.empty_like(steps, dtype=torch.int32) if asymmetric else None
    kernel("dynamic_scaled_int8_quant")(value, x, steps, zero)
    return (value, steps) if zero is None else (value, steps, zero)


OPS = (implementation(quant_int8, "static_scaled_int8_quant", "dynamic_scaled_int8_quant"),)
