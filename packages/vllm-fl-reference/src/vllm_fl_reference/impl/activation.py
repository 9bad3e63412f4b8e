"""Gated activations, as vLLM's `SiluAndMul` and `GeluAndMul` compute them in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "gelu_and_mul", "silu_and_mul"]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:]; silu is rounded to x's dtype before the product.

    Args:
        x: (..., 2 * d), floating.

    Returns:
        (..., d), of x's dtype.

    Raises:
        ValueError: the last dimension of x is odd.
        RuntimeError: x is not floating.
    """
    _refuse_silent_mistakes(x)
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:]; gelu is rounded to x's dtype before the product.

    Args:
        x: (..., 2 * d), floating.
        approximate: "none" (erf) or "tanh".

    Returns:
        (..., d), of x's dtype.

    Raises:
        ValueError: the last dimension of x is odd.
        RuntimeError: x is not floating, or `approximate` is another word.
    """
    _refuse_silent_mistakes(x)
    d = x.shape[-1] // 2
    return F.gelu(x[..., :d], approximate=approximate) * x[..., d:]


def _refuse_silent_mistakes(x: torch.Tensor) -> None:
    if x.shape[-1] % 2:  # three features would broadcast: one gate for two of them
        raise ValueError(f"x must have an even last dimension, got {x.shape[-1]}")


OPS = implementations(silu_and_mul, gelu_and_mul)
