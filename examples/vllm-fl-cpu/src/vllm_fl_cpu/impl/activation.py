"""Gated activations, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import LANES, VENDOR, kernel, provides, unsuitable

__all__ = ["OPS", "gelu_and_mul", "silu_and_mul", "supports_gelu_and_mul", "supports_silu_and_mul"]

GELU = {"none": "gelu_and_mul", "tanh": "gelu_tanh_and_mul"}


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] in fp32, rounded once.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout; d a multiple of 8.

    Returns:
        (..., d), of x's dtype.

    Raises:
        RuntimeError: the kernel refuses d.
    """
    return _gated("silu_and_mul", x)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:] in fp32, rounded once.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout; d a multiple of 8.
        approximate: "none" (erf) or "tanh".

    Returns:
        (..., d), of x's dtype.

    Raises:
        KeyError: `approximate` is another word.
        RuntimeError: the kernel refuses d.
    """
    return _gated(GELU[approximate], x)


def supports_silu_and_mul(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("x", x)
    if reason:
        return reason
    if x.ndim == 0 or x.shape[-1] % (2 * LANES):
        return f"the last dimension of x, {tuple(x.shape)[-1:]}, is no multiple of {2 * LANES}"
    return True


def supports_gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> Availability:
    """True, or why the kernel would fail."""
    return supports_silu_and_mul(x)


def _gated(name: str, x: torch.Tensor) -> torch.Tensor:
    # The kernels read x as if it were contiguous, whatever its strides.
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    kernel(name)(out, x)
    return out


OPS = (
    OpImpl(
        "silu_and_mul",
        *VENDOR,
        silu_and_mul,
        "cpu",
        available=provides("silu_and_mul"),
        supports=supports_silu_and_mul,
    ),
    OpImpl(
        "gelu_and_mul",
        *VENDOR,
        gelu_and_mul,
        "cpu",
        available=provides("gelu_and_mul", "gelu_tanh_and_mul"),
        supports=supports_gelu_and_mul,
    ),
)
