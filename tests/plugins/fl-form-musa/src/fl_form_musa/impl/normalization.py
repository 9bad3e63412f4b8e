"""Normalisation. With a residual both are overwritten, like in the device's fused kernel."""

from __future__ import annotations

import torch


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return wide.to(x.dtype) * weight


def rms_norm_musa(obj, x: torch.Tensor, residual: torch.Tensor | None = None):
    weight, epsilon = obj.weight, obj.variance_epsilon
    if residual is None:
        return _normed(x, weight, epsilon)
    residual.add_(x)
    x.copy_(_normed(residual, weight, epsilon))
    return x, residual
