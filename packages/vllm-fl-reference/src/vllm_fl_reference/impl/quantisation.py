"""Activations to eight bits, in PyTorch."""

from __future__ import annotations

import torch

from . import implementations

__all__ = ["OPS", "quant_int8"]


def quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """The nearest int8 to x / scale + azp, saturating, computed in fp32; halves go to even.

    Args:
        x: (tokens, hidden), floating, finite.
        scale: one float32 number; None for a scale for each token.
        azp: one int32 number with `scale`; None for 0.
        asymmetric: True for a zero point for each token; not with `scale`.

    Returns:
        (value, scale), or (value, scale, azp) with `asymmetric`.

    Raises:
        TypeError: x is not floating.
        ValueError: x is not (tokens, hidden), scale or azp is more than one number, or an argument
            is given that another one rules out.
    """
    _refuse_silent_mistakes(x, scale)
    if scale is None and azp is not None:
        raise ValueError("azp must be None without a scale")
    if asymmetric is not None and (asymmetric is not True or scale is not None):
        raise ValueError(f"asymmetric must be True or None, and None with a scale: {asymmetric}")
    wide = x.float()
    if scale is not None:
        value = (wide / scale.reshape(())).round()
        if azp is not None:
            if azp.numel() != 1 or azp.dtype != torch.int32:
                raise ValueError(f"azp must be one int32 number, got {azp.shape} of {azp.dtype}")
            value = value + azp.reshape(())
        return value.clamp(-128, 127).to(torch.int8), scale.clone()
    if asymmetric:
        low, high = wide.aminmax(dim=-1, keepdim=True)
        steps = (high - low) / 255
        zero = (-128 - low / steps).round()
        value = ((wide / steps).round() + zero).clamp(-128, 127)
        return value.to(torch.int8), steps, zero.to(torch.int32)
    steps = wide.abs().amax(dim=-1, keepdim=True) / 127
    # A row of zeros has no scale to divide by.
    value = (wide / steps.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return value.clamp(-128, 127).to(torch.int8), steps


def _refuse_silent_mistakes(x: torch.Tensor, scale: torch.Tensor | None) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x must be floating, got {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x must be (tokens, hidden), got {tuple(x.shape)}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"scale must be one float32 number, got {scale.shape} of {scale.dtype}")


OPS = implementations(quant_int8)
