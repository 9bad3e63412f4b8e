"""Gated activation with GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import implementation

__all__ = ["IMPL", "gelu_and_mul"]


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:] for x of shape (..., 2 * d); approximate: "none" or "tanh"."""
    d = x.shape[-1] // 2
    x = x.contiguous()  # results must be contiguous
    gate, up = x[..., :d], x[..., d:]
    return F.gelu(gate, approximate=approximate) * up


IMPL = implementation(gelu_and_mul)
