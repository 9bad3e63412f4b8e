"""RMS normalisation, on torch_npu's kernels."""

from __future__ import annotations

import torch

from . import DIMENSIONS, implementation

__all__ = ["OPS", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y / sqrt(mean(y**2) + epsilon) * weight, with y = x + residual; out of place.

    Uses `npu_rms_norm`, or `npu_add_rms_norm` with a residual. Without a weight, a tensor of ones
    is created. Not supported: `variance_size`, a weight of another dtype.
    """
    if not x.numel():
        empty = x.new_empty(x.shape)
        return empty if residual is None else (empty, x.new_empty(x.shape))
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    normed: torch.Tensor
    total: torch.Tensor
    if residual is None:
        normed, _rstd = torch.ops.npu.npu_rms_norm.default(_rows(x), weight, epsilon=epsilon)
        return normed.contiguous().view(x.shape)
    normed, _rstd, total = torch.ops.npu.npu_add_rms_norm.default(
        _rows(x), _rows(residual), weight, epsilon=epsilon
    )
    return normed.contiguous().view(x.shape), total.contiguous().view(x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with at least two dimensions, which the kernels require."""
    return x[None] if x.ndim == 1 else x


OPS = (
    implementation(
        rms_norm,
        DIMENSIONS,
        "variance_size is None",
        "weight is None or weight.dtype == x.dtype",
    ),
)
