"""RMS normalisation, on vLLM's CUDA kernels."""

from __future__ import annotations

import torch

from . import ALIGNMENT, implementation, kernel, packed

__all__ = ["OPS", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y / sqrt(mean(y**2) + epsilon) * weight in fp32, with y = x + residual in x's dtype.

    With a residual the kernel works in place, and may overwrite x and residual. Without one, x is
    read with its strides, so the heads of a qkv buffer are not copied. Not supported:
    `variance_size`, a weight of another dtype. RuntimeError if the kernel rejects a dtype or a
    size.
    """
    if residual is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if out.numel():  # an empty grid is a launch error
            kernel("rms_norm")(out, _readable(x), _aligned(weight), epsilon)
        return out
    normed, total = packed(x), packed(residual)
    if normed.numel():
        _fused_add_rms_norm(normed, total, _aligned(weight), epsilon)
    return normed, total


def _aligned(weight: torch.Tensor | None) -> torch.Tensor | None:
    return weight if weight is None or not weight.data_ptr() % ALIGNMENT else weight.clone()


def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    if x.ndim != 2:  # the kernel reads the stride of the last dimension but one
        x, residual = x.view(-1, x.shape[-1]), residual.view(-1, x.shape[-1])
    kernel("fused_add_rms_norm")(x, residual, weight, epsilon)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Return `x` or a copy in a layout that `rms_norm` supports: 2 to 4 dimensions, aligned."""
    aligned = 2 <= x.ndim <= 4 and not x.data_ptr() % ALIGNMENT
    if aligned and (x.is_contiguous() or _in_step(x)):
        return x
    return packed(x).view(-1, x.shape[-1])


def _in_step(x: torch.Tensor) -> bool:
    *steps, feature_step = x.stride()
    vector = ALIGNMENT // x.itemsize
    return feature_step == 1 and all(step % vector == 0 for step in steps)


OPS = (
    implementation(
        rms_norm,
        "rms_norm",
        "fused_add_rms_norm",
        takes=(
            "variance_size is None",
            "weight is None or (weight.dtype == x.dtype and weight.is_contiguous())",
        ),
        consumes=("x", "residual"),
    ),
)
