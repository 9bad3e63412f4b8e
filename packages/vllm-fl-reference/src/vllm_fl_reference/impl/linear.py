"""Projections, as vLLM's layers compute them in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "linear", "linear_fp8", "linear_gelu_tanh_and_mul", "linear_silu_and_mul"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, computed by PyTorch's matrix product.

    Args:
        x: (tokens, in_features), floating.
        weight: (out_features, in_features), of x's dtype.
        bias: (out_features,), of x's dtype, or None for 0.

    Returns:
        (tokens, out_features), of x's dtype.
    """
    return F.linear(x, weight, bias)


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (weight * weight_scale).T + bias, computed in fp32.

    Args:
        x: (tokens, in_features), float8_e4m3fn.
        weight: (out_features, in_features), float8_e4m3fn.
        x_scale: float32, (tokens, 1), or one number in at most one dimension.
        weight_scale: float32, (out_features, 1), or one number in at most one dimension.
        out_dtype: float16 or bfloat16.
        bias: (out_features,), of out_dtype, or None for 0.

    Returns:
        (tokens, out_features), of out_dtype.
    """
    result = F.linear(x.float() * x_scale, weight.float() * weight_scale)
    return (result if bias is None else result + bias).to(getattr(torch, out_dtype))


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T), computed by PyTorch's matrix product.

    Args:
        x: (tokens, in_features), floating.
        weight: (2 * out_features, in_features), of x's dtype: the rows of gate, then those of up.

    Returns:
        (tokens, out_features), of x's dtype. The products and silu are rounded to it.
    """
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_gelu_tanh_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """gelu(x @ gate.T) * (x @ up.T) with the tanh approximation; otherwise as the op for silu."""
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


OPS = implementations(linear, linear_fp8, linear_gelu_tanh_and_mul, linear_silu_and_mul)
