"""RMS normalisation, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import LANES, VENDOR, kernel, provides, rounded, unsuitable, writable

__all__ = ["OPS", "rms_norm", "supports_rms_norm"]


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y / sqrt(mean(y**2) + epsilon) * weight in fp32, where y = x + residual.

    With a residual the kernel works in place: x and residual may be overwritten. Without one,
    x is left as it was.

    Args:
        x: (..., hidden), float32, float16 or bfloat16, of any layout; hidden a multiple of 8.
        residual: of x's shape and dtype, or None.
        weight: (hidden,), contiguous, of x's dtype, or None for 1.
        epsilon: added to the mean of squares.
        variance_size: None, which `supports` sees to; the kernels know no other mean.

    Returns:
        The normed tensor; with a residual the pair (normed, y).

    Raises:
        RuntimeError: the kernel refuses a dtype or a size.
    """
    # The kernels take x and residual for contiguous, whatever their strides: the heads of a qkv
    # buffer would come out wrong without an error. Copy and kernel beat PyTorch all the same.
    scale = None if weight is None else rounded(weight)
    if residual is None:
        read = rounded(x).contiguous()
        out = torch.empty_like(read)
        kernel("rms_norm")(out, read, scale, epsilon)
        return out.to(x.dtype)
    normed, total = (writable(rounded(each)) for each in (x, residual))
    kernel("fused_add_rms_norm")(normed, total, scale, epsilon)
    return normed.to(x.dtype), total.to(x.dtype)


def supports_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Availability:
    """True, or why the kernels would fail."""
    reason = unsuitable("x", x)
    if reason:
        return reason
    if variance_size is not None:
        return "the kernels have no variance_size"
    if x.ndim == 0 or x.shape[-1] % LANES:
        return f"the last dimension of x, {tuple(x.shape)[-1:]}, is no multiple of {LANES}"
    if epsilon < 0:
        return f"epsilon is negative: {epsilon}"
    # The kernels check neither of these shapes, and read and write beyond a smaller tensor.
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        return (
            f"residual is {residual.dtype} {tuple(residual.shape)} and x {x.dtype} {tuple(x.shape)}"
        )
    if weight is None:
        return True
    if weight.shape != x.shape[-1:]:
        return f"weight is {tuple(weight.shape)} and the last dimension of x {tuple(x.shape)[-1:]}"
    if weight.dtype != x.dtype:
        return f"weight is {weight.dtype} and x {x.dtype}"
    return True if weight.is_contiguous() else "weight is not contiguous"


OPS = (
    OpImpl(
        "rms_norm",
        *VENDOR,
        rms_norm,
        "cpu",
        available=provides("rms_norm", "fused_add_rms_norm"),
        supports=supports_rms_norm,
        consumes=frozenset({"x", "residual"}),
    ),
)
