"""Projections, equal to the PyTorch code in vLLM's layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "linear", "linear_fp8", "linear_gelu_tanh_and_mul", "linear_silu_and_mul"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (weight * weight_scale).T + bias, computed in fp32."""
    result = F.linear(x.float() * x_scale, weight.float() * weight_scale)
    return (result if bias is None else result + bias).to(getattr(torch, out_dtype))


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T); the products and silu are rounded to x's dtype."""
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_gelu_tanh_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """gelu(x @ gate.T) * (x @ up.T) with the tanh approximation; rounded as the op for silu."""
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


OPS = implementations(linear, linear_fp8, linear_gelu_tanh_and_mul, linear_silu_and_mul)
