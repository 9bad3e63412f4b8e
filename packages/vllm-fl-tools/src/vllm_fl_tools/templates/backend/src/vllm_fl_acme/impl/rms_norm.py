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
    """y * rsqrt(mean(y**2) + epsilon) * weight, where y = x + residual; with a residual (that, y).

    The sum and the norm are computed in fp32. The mean goes over the first `variance_size`
    features, or all.
    """
    x = x.contiguous()  # results are, whatever the layout of x
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
