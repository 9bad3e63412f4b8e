"""Projections, as vLLM's layers compute them in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "linear", "linear_fp8", "linear_gelu_tanh_and_mul", "linear_silu_and_mul"]


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
        weight_scale: the same for out_features.
        out_dtype: float16 or bfloat16.
        bias: (out_features,), of out_dtype, or None for 0.

    Returns:
        (tokens, out_features), of out_dtype.

    Raises:
        TypeError: x or weight is not float8_e4m3fn, a scale not float32, or bias not of out_dtype.
        ValueError: x or weight is not 2-D, a scale is not as said here, out_dtype is another one,
            or bias is not (out_features,).
        RuntimeError: the features of x and weight differ.
    """
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(out_dtype)
    if dtype is None:
        raise ValueError(f"out_dtype must be float16 or bfloat16, got {out_dtype!r}")
    if bias is not None and bias.dtype != dtype:
        raise TypeError(f"bias must be {dtype}, got {bias.dtype}")
    for name, values, scale in (("x", x, x_scale), ("weight", weight, weight_scale)):
        if values.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
            raise TypeError(
                f"{name} must be torch.float8_e4m3fn with a scale of torch.float32, got "
                f"{values.dtype} and {scale.dtype}"
            )
        if scale.shape not in ((), (1,), (*values.shape[:1], 1)):
            raise ValueError(
                f"{name}_scale must be one number, or one for each row of {tuple(values.shape)}, "
                f"got {tuple(scale.shape)}"
            )
    _refuse_silent_mistakes(x, weight, bias)
    result = F.linear(x.float() * x_scale, weight.float() * weight_scale)
    return (result if bias is None else result + bias).to(dtype)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T), by PyTorch's own product of matrices.

    Args:
        x: (tokens, in_features), floating.
        weight: (2 * out_features, in_features), of x's dtype: the rows of gate, then those of up.

    Returns:
        (tokens, out_features), of x's dtype. The products, and silu, are rounded to it.

    Raises:
        TypeError: x is not floating.
        ValueError: x or weight is not 2-D, or weight has an odd number of rows.
        RuntimeError: the sizes or dtypes of x and weight differ.
    """
    gate, up = _halves(x, weight)
    return F.silu(gate) * up


def linear_gelu_tanh_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """gelu(x @ gate.T) * (x @ up.T), with gelu's approximation by tanh; all else is as for silu."""
    gate, up = _halves(x, weight)
    return F.gelu(gate, approximate="tanh") * up


def _halves(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The products of a weight's two parts."""
    _refuse_silent_mistakes(x, weight, None)
    if weight.shape[0] % 2:
        raise ValueError(f"weight must have an even number of rows, got {weight.shape[0]}")
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return gate, up


OPS = implementations(linear, linear_fp8, linear_gelu_tanh_and_mul, linear_silu_and_mul)
