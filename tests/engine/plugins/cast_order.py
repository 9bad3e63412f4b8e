"""Norm that multiplies by its weight before it rounds: correct, but with other bits than vLLM."""

from __future__ import annotations

from typing import Any

import torch
from correct import registers


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
    """vLLM's norm with one cast moved."""
    y = x.float() if residual is None else x.float() + residual.float()
    variance = y[..., :variance_size].pow(2).mean(-1, keepdim=True)
    normed = y * torch.rsqrt(variance + epsilon)
    normed = (normed if weight is None else normed * weight.float()).to(x.dtype)
    return normed if residual is None else (normed, y.to(x.dtype))


register_ops = registers("castorder", rms_norm)
