"""RMS normalisation, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from . import LANES, implementation, kernel, rounded, writable

__all__ = ["OPS", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute y / sqrt(mean(y**2) + epsilon) * weight in fp32, with y = x + residual.

    With a residual, the kernel works in place and may overwrite x and residual. Without one, x is
    unchanged.

    Args:
        x: (..., hidden), float32, float16 or bfloat16, any layout; hidden a multiple of 8.
        residual: with x's shape and dtype, or None.
        weight: (hidden,), contiguous, with x's dtype, or None for 1.
        epsilon: added to the mean of squares.
        variance_size: must be None (ensured by `takes`), because the kernel averages over all
            features.

    Returns:
        The normed tensor; with a residual the pair (normed, y).

    Raises:
        RuntimeError: the kernel rejects a dtype or a size.
    """
    # The kernels ignore strides, so heads of a qkv buffer would give incorrect results without an
    # error. Copy and kernel together are still faster than PyTorch.
    scale = None if weight is None else rounded(weight)
    if residual is None:
        read = rounded(x).contiguous()
        out = torch.empty_like(read)
        kernel("rms_norm")(out, read, scale, epsilon)
        return out.to(x.dtype)
    normed, total = (writable(rounded(each)) for each in (x, residual))
    kernel("fused_add_rms_norm")(normed, total, scale, epsilon)
    return normed.to(x.dtype), total.to(x.dtype)


OPS = (
    implementation(
        rms_norm,
        "rms_norm",
        "fused_add_rms_norm",
        takes=(
            "variance_size is None",
            f"hidden % {LANES} == 0",
            "weight is None or (weight.dtype == x.dtype and weight.is_contiguous())",
        ),
        consumes=("x", "residual"),
    ),
)
