"""Gated activations, as vLLM's layers compute them in PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "gelu_and_mul", "silu_and_mul", "swigluoai_and_mul"]


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


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped pairs; every step is rounded.

    Args:
        x: (..., 2 * d), floating: gate and up projection take turns.
        alpha: a finite number.
        limit: a finite number above 0: the largest gate, and how far up lies from 0 at most.

    Returns:
        (..., d), of x's dtype.

    Raises:
        TypeError: x is not floating, or alpha or limit no number.
        ValueError: the last dimension of x is odd, or alpha or limit is out of its range.
    """
    _refuse_silent_mistakes(x)
    if not x.is_floating_point():  # sigmoid would turn integers into float32
        raise TypeError(f"x must be floating, got {x.dtype}")
    if not -math.inf < alpha < math.inf or not 0 < limit < math.inf:  # isfinite cannot be traced
        raise ValueError(f"alpha must be finite, limit finite and above 0, got {alpha} and {limit}")
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _refuse_silent_mistakes(x: torch.Tensor) -> None:
    if x.shape[-1] % 2:  # three features would broadcast: one gate for two of them
        raise ValueError(f"x must have an even last dimension, got {x.shape[-1]}")


OPS = implementations(silu_and_mul, gelu_and_mul, swigluoai_and_mul)
