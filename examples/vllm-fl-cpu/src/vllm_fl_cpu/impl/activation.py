"""Activations, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import LANES, VENDOR, kernel, provides, rounded, unsuitable

__all__ = [
    "OPS",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "quick_gelu",
    "silu_and_mul",
    "supports_gelu_and_mul",
    "supports_gelu_fast",
    "supports_gelu_new",
    "supports_quick_gelu",
    "supports_silu_and_mul",
]

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
    return _filled("silu_and_mul", x, x.shape[-1] // 2)


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
    return _filled(GELU[approximate], x, x.shape[-1] // 2)


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


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)) in fp32, rounded once.

    Args:
        x: (..., d), float32, float16 or bfloat16, of any layout; d a multiple of 8.

    Returns:
        x's shape and dtype.

    Raises:
        RuntimeError: the kernel refuses d.
    """
    return _filled("gelu_new", x, x.shape[-1])


def supports_gelu_new(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("x", x)
    if reason:
        return reason
    if x.ndim == 0 or x.shape[-1] % LANES:
        return f"the last dimension of x, {tuple(x.shape)[-1:]}, is no multiple of {LANES}"
    return True


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh(0.79788456 * x * (1 + 0.044715 * x**2)) in fp32, rounded once.

    Args:
        x: (..., d), float32, float16 or bfloat16, of any layout; d a multiple of 8.

    Returns:
        x's shape and dtype.

    Raises:
        RuntimeError: the kernel refuses d.
    """
    return _filled("gelu_fast", x, x.shape[-1])


def supports_gelu_fast(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    return supports_gelu_new(x)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x) in fp32, rounded once, by the kernel `gelu_quick`.

    Args:
        x: (..., d), float32, float16 or bfloat16, of any layout; d a multiple of 8.

    Returns:
        x's shape and dtype.

    Raises:
        RuntimeError: the kernel refuses d.
    """
    return _filled("gelu_quick", x, x.shape[-1])


def supports_quick_gelu(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    return supports_gelu_new(x)


def _filled(name: str, x: torch.Tensor, features: int) -> torch.Tensor:
    # The kernels read x as if it were contiguous, whatever its strides.
    read = rounded(x).contiguous()
    out = read.new_empty((*x.shape[:-1], features))
    kernel(name)(out, read)
    return out.to(x.dtype)


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
    OpImpl(
        "gelu_new",
        *VENDOR,
        gelu_new,
        "cpu",
        available=provides("gelu_new"),
        supports=supports_gelu_new,
    ),
    OpImpl(
        "gelu_fast",
        *VENDOR,
        gelu_fast,
        "cpu",
        available=provides("gelu_fast"),
        supports=supports_gelu_fast,
    ),
    OpImpl(
        "quick_gelu",
        *VENDOR,
        quick_gelu,
        "cpu",
        available=provides("gelu_quick"),
        supports=supports_quick_gelu,
    ),
)
