"""Projections, as vLLM's layers compute them in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "linear"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, by PyTorch's own product of matrices.

    Args:
        x: (tokens, in_features), floating.
        weight: (out_features, in_features), of x's dtype.
        bias: (out_features,), of x's dtype, or None for 0.

    Returns:
        (tokens, out_features), of x's dtype.

    Raises:
        TypeError: x is not floating.
        ValueError: x or weight is not 2-D, or bias is not (out_features,).
        RuntimeError: the sizes or dtypes of x and weight, or of x and bias, differ.
    """
    _refuse_silent_mistakes(x, weight, bias)
    return F.linear(x, weight, bias)


def _refuse_silent_mistakes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """PyTorch would take other dimensions, broadcast a bias, and multiply integers."""
    if not x.is_floating_point():
        raise TypeError(f"x must be floating, got {x.dtype}")
    if x.ndim != 2 or weight.ndim != 2:
        raise ValueError(
            f"x and weight must be 2-D, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")


OPS = implementations(linear)
