"""RMS normalisation, on FlagGems's Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..loading import flag_gems, unsuitable

if TYPE_CHECKING:
    from vllm_fl.dispatch.types import Availability

__all__ = ["rms_norm", "supports_rms_norm"]


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y / sqrt(mean(y**2) + epsilon) * weight in fp32, rounded once, where y = x + residual.

    With a residual the kernel works in place where a tensor is contiguous: x and residual may be
    overwritten. Without one, x is left as it was.

    Args:
        x: (..., hidden), float32, float16 or bfloat16, of any layout.
        residual: of x's shape and dtype, or None.
        weight: (hidden,), of x's dtype or float32; None is refused by `supports`.
        epsilon: added to the mean of squares.
        variance_size: None, which `supports` sees to; the kernels know no other mean.

    Returns:
        The normed tensor; with a residual the pair (normed, y).

    Raises:
        NotImplementedError: FlagGems does not load.
    """
    gems = flag_gems()
    if residual is None:
        # Below `rms_norm`, whose bookkeeping for gradients takes 10 of 43 µs of the host.
        normed: torch.Tensor = gems.rms_norm_forward(x, x.shape[-1:], weight, epsilon)[0]
        return normed
    pair: tuple[torch.Tensor, torch.Tensor] = gems.fused_add_rms_norm(
        x, residual, x.shape[-1:], weight, epsilon
    )
    return pair


def supports_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Availability:
    """True, or why the kernels would fail."""
    if weight is None:
        return "the kernels need a weight"
    if variance_size is not None:
        return "the kernels have no variance_size"
    if epsilon < 0:
        return f"epsilon is negative: {epsilon}"
    # The kernels check neither of these shapes, and read and write beyond a smaller tensor.
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        return (
            f"residual is {residual.dtype} {tuple(residual.shape)} and x {x.dtype} {tuple(x.shape)}"
        )
    if weight.shape != x.shape[-1:]:
        return f"weight is {tuple(weight.shape)} and the last dimension of x {tuple(x.shape)[-1:]}"
    return unsuitable("x", x) or True
