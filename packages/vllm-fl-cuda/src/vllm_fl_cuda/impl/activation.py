"""Activations, on vLLM's CUDA kernels."""

from __future__ import annotations

import math

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, kernel, packed, provides, unsuitable

__all__ = [
    "OPS",
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "mul_and_silu",
    "quick_gelu",
    "relu2",
    "silu_and_mul",
    "silu_and_mul_with_clamp",
    "supports_fatrelu_and_mul",
    "supports_gelu_and_mul",
    "supports_gelu_fast",
    "supports_gelu_new",
    "supports_mul_and_silu",
    "supports_quick_gelu",
    "supports_relu2",
    "supports_silu_and_mul",
    "supports_silu_and_mul_with_clamp",
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


def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta) of clamped halves in fp32; the first product is
    rounded.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection. The
            kernel takes a NaN for `limit`.
        limit: a finite number above 0.
        alpha: a finite number.
        beta: a finite number.

    Returns:
        (..., d), of x's dtype.
    """
    return _gated("silu_and_mul_with_clamp", x, limit, alpha, beta)


def supports_silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> Availability:
    """True, or why the kernel would fail; it would compute with any number, and turn the clamp
    around below 0."""
    if not 0 < limit < math.inf or not math.isfinite(alpha) or not math.isfinite(beta):
        return f"limit={limit} is not finite and above 0, or alpha={alpha} or beta={beta} infinite"
    return supports_silu_and_mul(x)


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x[..., :d] * silu(x[..., d:]) in fp32; silu is rounded before the product.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout.

    Returns:
        (..., d), of x's dtype.
    """
    return _gated("mul_and_silu", x)


def supports_mul_and_silu(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    return supports_silu_and_mul(x)


def fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """gate * x[..., d:], where gate is x[..., :d] above the threshold and 0 elsewhere.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout. The kernel takes a NaN in the
            gate for 0.
        threshold: a finite number, compared in fp32.

    Returns:
        (..., d), of x's dtype.
    """
    return _gated("fatrelu_and_mul", x, threshold)


def supports_fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> Availability:
    """True, or why the kernel would fail; with a threshold that is no number it would give 0."""
    if not math.isfinite(threshold):
        return f"threshold={threshold} is not finite"
    return supports_silu_and_mul(x)


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)); every step but tanh is rounded.

    Args:
        x: (..., d), float32, float16 or bfloat16, of any layout.

    Returns:
        x's shape and dtype.
    """
    return _elementwise("gelu_new", x)


def supports_gelu_new(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("x", x)
    if reason:
        return reason
    return True if x.ndim else "x has no dimension"


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh(0.79788456 * x * (1 + 0.044715 * x**2)); every step but tanh is rounded.

    Args:
        x: (..., d), float32, float16 or bfloat16, of any layout.

    Returns:
        x's shape and dtype.
    """
    return _elementwise("gelu_fast", x)


def supports_gelu_fast(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    return supports_gelu_new(x)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x) in fp32, rounded once, by the kernel `gelu_quick`.

    Args:
        x: (..., d), float32, float16 or bfloat16, of any layout.

    Returns:
        x's shape and dtype.
    """
    return _elementwise("gelu_quick", x)


def supports_quick_gelu(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    return supports_gelu_new(x)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)**2 in fp32, rounded once, by the kernel `relu_squared`.

    Args:
        x: (..., d), float32, float16 or bfloat16, of any layout. The kernel takes a NaN for 0.

    Returns:
        x's shape and dtype.
    """
    return _elementwise("relu_squared", x)


def supports_relu2(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail."""
    return supports_gelu_new(x)


def _gated(name: str, x: torch.Tensor, *numbers: float) -> torch.Tensor:
    # The kernels read x as if it were contiguous, whatever its strides.
    x = packed(x)
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if out.numel():  # an empty grid is a launch error
        kernel(name)(out, x, *numbers)
    return out


def _elementwise(name: str, x: torch.Tensor) -> torch.Tensor:
    # The kernels read x as if it were contiguous, whatever its strides.
    x = packed(x)
    out = x.new_empty(x.shape)
    if out.numel():  # an empty grid is a launch error
        kernel(name)(out, x)
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
    OpImpl(
        "silu_and_mul_with_clamp",
        *VENDOR,
        silu_and_mul_with_clamp,
        "cuda",
        available=provides("silu_and_mul_with_clamp"),
        supports=supports_silu_and_mul_with_clamp,
    ),
    OpImpl(
        "mul_and_silu",
        *VENDOR,
        mul_and_silu,
        "cuda",
        available=provides("mul_and_silu"),
        supports=supports_mul_and_silu,
    ),
    OpImpl(
        "fatrelu_and_mul",
        *VENDOR,
        fatrelu_and_mul,
        "cuda",
        available=provides("fatrelu_and_mul"),
        supports=supports_fatrelu_and_mul,
    ),
    OpImpl(
        "gelu_new",
        *VENDOR,
        gelu_new,
        "cuda",
        available=provides("gelu_new"),
        supports=supports_gelu_new,
    ),
    OpImpl(
        "gelu_fast",
        *VENDOR,
        gelu_fast,
        "cuda",
        available=provides("gelu_fast"),
        supports=supports_gelu_fast,
    ),
    OpImpl(
        "quick_gelu",
        *VENDOR,
        quick_gelu,
        "cuda",
        available=provides("gelu_quick"),
        supports=supports_quick_gelu,
    ),
    OpImpl(
        "relu2",
        *VENDOR,
        relu2,
        "cuda",
        available=provides("relu_squared"),
        supports=supports_relu2,
    ),
)
