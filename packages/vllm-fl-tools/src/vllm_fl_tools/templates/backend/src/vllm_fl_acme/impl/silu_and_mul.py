"""Gated activation with SiLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import implementation

__all__ = ["IMPL", "silu_and_mul"]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] for x of shape (..., 2 * d)."""
    d = x.shape[-1] // 2
    x = x.contiguous()  # results must be contiguous
    gate, up = x[..., :d], x[..., d:]
    return F.silu(gate) * up


IMPL = implementation(silu_and_mul)
