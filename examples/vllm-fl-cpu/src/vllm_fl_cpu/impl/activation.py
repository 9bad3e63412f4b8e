"""Activations, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from . import LANES, implementation, kernel, rounded

__all__ = [
    "OPS",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "quick_gelu",
    "silu_and_mul",
]

GELU = {"none": "gelu_and_mul", "tanh": "gelu_tanh_and_mul"}


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute silu(x[..., :d]) * x[..., d:] in fp32, rounded once.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, any layout; d a multiple of 8.

    Returns:
        (..., d), with x's dtype.

    Raises:
        RuntimeError: the kernel rejects d.
    """
    return _filled("silu_and_mul", x, x.shape[-1] // 2)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Compute gelu(x[..., :d]) * x[..., d:] in fp32, rounded once.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, any layout; d a multiple of 8.
        approximate: "none" (erf) or "tanh".

    Returns:
        (..., d), with x's dtype.

    Raises:
        KeyError: `approximate` has another value.
        RuntimeError: the kernel rejects d.
    """
    return _filled(GELU[approximate], x, x.shape[-1] // 2)


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """Compute GELU as x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) in fp32.

    Args:
        x: (..., d), float32, float16 or bfloat16, any layout; d a multiple of 8.

    Returns:
        A tensor with x's shape and dtype, rounded once.

    Raises:
        RuntimeError: the kernel rejects d.
    """
    return _filled("gelu_new", x, x.shape[-1])


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """Compute GELU as x / 2 * (1 + tanh(0.79788456 * x * (1 + 0.044715 * x**2))) in fp32.

    Args:
        x: (..., d), float32, float16 or bfloat16, any layout; d a multiple of 8.

    Returns:
        A tensor with x's shape and dtype, rounded once.

    Raises:
        RuntimeError: the kernel rejects d.
    """
    return _filled("gelu_fast", x, x.shape[-1])


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute x * sigmoid(1.702 * x) in fp32, rounded once, with the kernel `gelu_quick`.

    Args:
        x: (..., d), float32, float16 or bfloat16, any layout; d a multiple of 8.

    Returns:
        A tensor with x's shape and dtype.

    Raises:
        RuntimeError: the kernel rejects d.
    """
    return _filled("gelu_quick", x, x.shape[-1])


def _filled(name: str, x: torch.Tensor, features: int) -> torch.Tensor:
    # The kernels ignore strides and read x as contiguous.
    read = rounded(x).contiguous()
    out = read.new_empty((*x.shape[:-1], features))
    kernel(name)(out, read)
    return out.to(x.dtype)


GATED = (f"d % {LANES} == 0",)
ELEMENTWISE = (f"x.ndim > 0 and x.shape[-1] % {LANES} == 0",)

OPS = (
    implementation(silu_and_mul, "silu_and_mul", takes=GATED),
    implementation(gelu_and_mul, "gelu_and_mul", "gelu_tanh_and_mul", takes=GATED),
    implementation(gelu_new, "gelu_new", takes=ELEMENTWISE),
    implementation(gelu_fast, "gelu_fast", takes=ELEMENTWISE),
    implementation(quick_gelu, "gelu_quick", takes=ELEMENTWISE),
)
