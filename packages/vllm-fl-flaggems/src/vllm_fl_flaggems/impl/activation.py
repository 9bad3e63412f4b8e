"""Gated activations, on FlagGems's Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..loading import flag_gems, gated_kernel, unsuitable

if TYPE_CHECKING:
    from vllm_fl.dispatch.types import Availability

__all__ = ["gelu_and_mul", "silu_and_mul", "supports_gelu_and_mul", "supports_silu_and_mul"]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] in fp32, rounded once.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout.

    Returns:
        (..., d), of x's dtype.

    Raises:
        NotImplementedError: FlagGems does not load.
    """
    gems = flag_gems()
    out = _rows("silu_and_mul_kernel", x)
    if out is None:
        half = x.shape[-1] // 2
        out = x.new_empty((*x.shape[:-1], half))
        gems.silu_and_mul_out(x[..., :half], x[..., half:], out)
    return out


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:] in fp32, rounded once.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout.
        approximate: "none" (erf) or "tanh".

    Returns:
        (..., d), of x's dtype.

    Raises:
        NotImplementedError: FlagGems does not load.
        ValueError: `approximate` is another word.
    """
    gems = flag_gems()
    out = _rows(f"gelu_{approximate}_and_mul_kernel", x)
    if out is None:
        half = x.shape[-1] // 2
        out = gems.gelu_and_mul(x[..., :half], x[..., half:], approximate).contiguous()
    return out


def _rows(kernel: str, x: torch.Tensor) -> torch.Tensor | None:
    """The kernel on a matrix, as layers call it; None for any other `x`, or without the kernel.

    The public functions spend up to half of the host's time, 15 to 50 µs, on what only operands of
    unlike shapes and types need; `instantiate` is FlagGems's way past that. Beyond 2**31 elements
    they also choose another kind of pointer.
    """
    function = gated_kernel(kernel)
    if x.ndim != 2 or x.numel() >= 2**31 or not hasattr(function, "instantiate"):
        return None
    half = x.shape[1] // 2
    out = x.new_empty((x.shape[0], half))
    function.instantiate(2)(x[:, :half], x[:, half:], out0=out)
    return out


def supports_silu_and_mul(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    if x.ndim == 0 or x.shape[-1] % 2:
        return f"the last dimension of x, {tuple(x.shape)[-1:]}, has no two halves"
    return unsuitable("x", x) or True


def supports_gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> Availability:
    """True, or why the kernel would fail."""
    return supports_silu_and_mul(x)
