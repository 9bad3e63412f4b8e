"""RMS normalisation, on FlagGems's Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..kernels import contiguous, launchable, warps
from ..loading import flag_gems, unsuitable

if TYPE_CHECKING:
    from vllm_fl.dispatch.types import Availability

__all__ = ["rms_norm", "supports_rms_norm"]

LONGEST_ROW = 4096
"""FlagGems norms a longer row in several steps, with a kernel that it tunes."""


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
    hidden = x.shape[-1]
    if residual is None:
        kernel = launchable("rms_norm_kernel")
        if kernel is None or hidden > LONGEST_ROW:
            normed: torch.Tensor = gems.rms_norm_forward(x, x.shape[-1:], weight, epsilon)[0]
            return normed
        x = contiguous(x)
        normed = x.new_empty(x.shape)
        rows = x.numel() // hidden
        inverse = x.new_empty(rows, dtype=torch.float32)  # for gradients; the kernel writes it
        _launch(kernel, rows, (normed, inverse, x), weight, epsilon)
        return normed
    kernel = launchable("fused_add_rms_norm_kernel")
    if kernel is None:
        pair: tuple[torch.Tensor, torch.Tensor] = gems.fused_add_rms_norm(
            x, residual, x.shape[-1:], weight, epsilon
        )
        return pair
    x, residual = contiguous(x), contiguous(residual)
    _launch(kernel, x.numel() // hidden, (x, residual), weight, epsilon)
    return x, residual


def _launch(
    kernel: Any,
    rows: int,
    tensors: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None,
    epsilon: float,
) -> None:
    """A program for each row. Both kernels count strides for two contiguous tensors."""
    assert weight is not None  # `supports` sees to it
    hidden = weight.shape[0]
    block = 1 << (hidden - 1).bit_length()
    strides = (hidden, 1, hidden, 1)
    with torch.cuda.device(weight.device):
        kernel[(rows,)](
            *tensors,
            weight.contiguous(),
            *strides,
            hidden,
            epsilon,
            block,
            num_warps=warps(block),
        )


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
    if x.numel() >= 2**31:
        return f"x has {x.numel()} elements, and the kernels count them in 32 bits"
    return unsuitable("x", x) or True
