"""Gated activations, on FlagGems's Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..loading import flag_gems, unsuitable

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
    half = x.shape[-1] // 2
    out: torch.Tensor = flag_gems().silu_and_mul_out(
        x[..., :half], x[..., half:], x.new_empty((*x.shape[:-1], half))
    )
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
    half = x.shape[-1] // 2
    out: torch.Tensor = flag_gems().gelu_and_mul(x[..., :half], x[..., half:], approximate)
    return out.contiguous()


def supports_silu_and_mul(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    if x.ndim == 0 or x.shape[-1] % 2:
        return f"the last dimension of x, {tuple(x.shape)[-1:]}, has no two halves"
    return unsuitable("x", x) or True


def supports_gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> Availability:
    """True, or why the kernel would fail."""
    return supports_silu_and_mul(x)
