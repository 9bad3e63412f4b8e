"""Quantisation of activations to 8 bits, in PyTorch."""

from __future__ import annotations

import torch

from . import implementations

__all__ = ["OPS", "quant_fp8", "quant_fp8_group", "quant_int8"]

MOST = 448.0
"""Largest float8_e4m3fn."""

LEAST_SCALE = 1.0 / (MOST * 512.0)


def quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Round x / scale + azp to int8, saturating, computed in fp32; ties go to even."""
    wide = x.float()
    if scale is not None:
        value = (wide / scale.reshape(())).round()
        if azp is not None:
            value = value + azp.reshape(())
        return value.clamp(-128, 127).to(torch.int8), scale.clone()
    if asymmetric:
        low, high = wide.aminmax(dim=-1, keepdim=True)
        equal = low == high  # a row of equal numbers needs 0 as its other bound
        low = low.clamp(max=0).where(equal, low)
        steps = (high.clamp(min=0).where(equal, high) - low) / 255
        least = steps.clamp(min=torch.finfo(torch.float32).tiny)  # a row of zeros has no scale
        zero = (-128 - low / least).round()
        value = ((wide / least).round() + zero).clamp(-128, 127)
        return value.to(torch.int8), steps, zero.to(torch.int32)
    steps = wide.abs().amax(dim=-1, keepdim=True) / 127
    # A row of zeros has no scale to divide by.
    value = (wide / steps.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return value.clamp(-128, 127).to(torch.int8), steps


def quant_fp8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    per_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x * (1 / scale) to float8_e4m3fn, saturating; the reciprocal is in fp32.

    A scale that is not given is at least 1 / (448 * 512).
    """
    if scale is not None:
        steps = scale.clone()
    else:
        if per_token:
            largest = x.abs().amax(dim=-1, keepdim=True).to(torch.float32)
        elif x.numel():
            largest = x.abs().max().unsqueeze(-1).to(torch.float32)
        else:
            largest = x.new_zeros(1, dtype=torch.float32)
        if scale_ub is not None:
            largest = largest.clamp(max=scale_ub)
        steps = (largest / MOST).clamp(min=LEAST_SCALE)
    one = steps if per_token else steps.reshape(())
    value = (x.to(torch.float32) * one.reciprocal()).clamp(-MOST, MOST)
    return value.to(torch.float8_e4m3fn), steps


def quant_fp8_group(
    x: torch.Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x / scale of its group to float8_e4m3fn, computed in fp32."""
    groups = x.to(torch.float32).unflatten(-1, (x.shape[1] // group_size, group_size))
    steps = groups.abs().amax(dim=-1).clamp(min=eps) / MOST
    if ue8m0:
        steps = steps.log2().ceil().exp2()
    value = (groups / steps.unsqueeze(-1)).clamp(-MOST, MOST)
    return value.flatten(-2).to(torch.float8_e4m3fn), steps


OPS = implementations(quant_fp8, quant_fp8_group, quant_int8)
