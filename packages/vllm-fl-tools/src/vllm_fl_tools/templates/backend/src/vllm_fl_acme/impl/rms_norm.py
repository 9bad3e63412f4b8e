"""RMS normalisation."""

from __future__ import annotations

import torch

from . import implementation

__all__ = ["IMPL", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return normed = y * rsqrt(mean(y**2) + epsilon) * weight, with y = x + residual.

    With a residual, return (normed, y). Sum and norm are computed in fp32. The mean is taken over
    the first `variance_size` features, or all.
    """
    x = x.contiguous()  # results must be contiguous
    y = x.float()
    if residual is not None:
        y = y + residual.float()
    head = y[..., :variance_size]
    variance = head.square().mean(dim=-1, keepdim=True)
    normed = y * torch.rsqrt(variance + epsilon)
    if weight is not None:
        normed = normed * weight.float()
    out = normed.to(x.dtype, memory_format=torch.contiguous_format)
    return out if residual is None else (out, y.to(x.dtype))


IMPL = implementation(rms_norm)
