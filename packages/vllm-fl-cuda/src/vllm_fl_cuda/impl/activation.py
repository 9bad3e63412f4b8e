"""Gated activations, on vLLM's CUDA kernels."""

from __future__ import annotations

import math

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, kernel, packed, provides, unsuitable

__all__ = [
    "OPS",
    "gelu_and_mul",
    "silu_and_mul",
    "supports_gelu_and_mul",
    "supports_silu_and_mul",
    "supports_swigluoai_and_mul",
    "swigluoai_and_mul",
]

GELU = {"none": "gelu_and_mul", "tanh": "gelu_tanh_and_mul"}


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] in fp32; silu is rounded before the product.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout.

    Returns:
        (..., d), of x's dtype.
    """
    return _gated("silu_and_mul", x)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:] in fp32; gelu is rounded before the product.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout.
        approximate: "none" (erf) or "tanh".

    Returns:
        (..., d), of x's dtype.

    Raises:
        KeyError: `approximate` is another word.
    """
    return _gated(GELU[approximate], x)


def supports_silu_and_mul(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("x", x)
    if reason:
        return reason
    if x.ndim == 0 or x.shape[-1] % 2:
        return f"the last dimension of x, {tuple(x.shape)[-1:]}, has no two halves"
    return True


def supports_gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> Availability:
    """True, or why the kernel would fail."""
    return supports_silu_and_mul(x)


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped pairs in fp32, rounded once.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate and up projection take
            turns. Some releases of the kernel take a NaN for `limit`.
        alpha: a finite number.
        limit: a finite number above 0.

    Returns:
        (..., d), of x's dtype.
    """
    return _gated("swigluoai_and_mul", x, alpha, limit)


def supports_swigluoai_and_mul(
    x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> Availability:
    """True, or why the kernel would fail; it would compute with any number, and turn the clamp
    around below 0."""
    if not math.isfinite(alpha) or not 0 < limit < math.inf:
        return f"alpha={alpha} is not finite, or limit={limit} not finite and above 0"
    return supports_silu_and_mul(x)


def _gated(name: str, x: torch.Tensor, *numbers: float) -> torch.Tensor:
    # The kernels read x as if it were contiguous, whatever its strides.
    x = packed(x)
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if out.numel():  # an empty grid is a launch error
        kernel(name)(out, x, *numbers)
    return out


OPS = (
    OpImpl(
        "silu_and_mul",
        *VENDOR,
        silu_and_mul,
        "cuda",
        available=provides("silu_and_mul"),
        supports=supports_silu_and_mul,
    ),
    OpImpl(
        "gelu_and_mul",
        *VENDOR,
        gelu_and_mul,
        "cuda",
        available=provides("gelu_and_mul", "gelu_tanh_and_mul"),
        supports=supports_gelu_and_mul,
    ),
    OpImpl(
        "swigluoai_and_mul",
        *VENDOR,
        swigluoai_and_mul,
        "cuda",
        available=provides("swigluoai_and_mul"),
        supports=supports_swigluoai_and_mul,
    ),
)
