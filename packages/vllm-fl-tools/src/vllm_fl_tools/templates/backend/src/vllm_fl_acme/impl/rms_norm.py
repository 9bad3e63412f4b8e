"""RMS normalisation."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, available, elsewhere, unsuitable

__all__ = ["IMPL", "rms_norm", "supports_rms_norm"]


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


def supports_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Availability:
    """True, or why the kernel would fail. Looks at neither values nor the number of tokens."""
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        return "residual is not of x's shape and dtype"
    if weight is not None and weight.shape != x.shape[-1:]:
        return f"weight is {tuple(weight.shape)}, not (hidden,)"
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        return f"weight is {weight.dtype}, neither {x.dtype} nor torch.float32"
    if variance_size is not None and not 1 <= variance_size <= x.shape[-1]:
        return f"variance_size {variance_size} is not from 1 to {x.shape[-1]}"
    if not epsilon >= 0:
        return f"epsilon is {epsilon}"
    if reason := elsewhere(x, residual=residual, weight=weight):
        return reason
    return unsuitable("x", x) or True


IMPL = OpImpl(
    "rms_norm",
    *VENDOR,
    rms_norm,
    "acme",
    available=available,
    supports=supports_rms_norm,
)
