"""Activations, on vLLM's CUDA kernels."""

from __future__ import annotations

import torch

from . import implementation, kernel, packed

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
    "swigluoai_and_mul",
]

ROWS = ("x.ndim > 0",)

GELU = {"none": "gelu_and_mul", "tanh": "gelu_tanh_and_mul"}


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] in fp32; silu is rounded before the product."""
    return _gated("silu_and_mul", x)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:] in fp32; gelu is rounded before the product.

    An unknown `approximate` raises KeyError.
    """
    return _gated(GELU[approximate], x)


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped pairs in fp32, rounded once.

    Some releases of the kernel replace NaN by `limit`.
    """
    return _gated("swigluoai_and_mul", x, alpha, limit)


def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta) of clamped halves in fp32.

    The first product is rounded. The kernel replaces NaN by `limit`.
    """
    return _gated("silu_and_mul_with_clamp", x, limit, alpha, beta)


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x[..., :d] * silu(x[..., d:]) in fp32; silu is rounded before the product."""
    return _gated("mul_and_silu", x)


def fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """gate * x[..., d:]; gate is x[..., :d] if above the threshold, otherwise 0.

    The kernel compares in fp32, and replaces NaN in the gate by 0.
    """
    return _gated("fatrelu_and_mul", x, threshold)


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU with tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)); every step but tanh is rounded."""
    return _elementwise("gelu_new", x)


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """GELU with tanh(0.79788456 * x * (1 + 0.044715 * x**2)); every step but tanh is rounded."""
    return _elementwise("gelu_fast", x)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x) in fp32, rounded once (kernel `gelu_quick`)."""
    return _elementwise("gelu_quick", x)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)**2 in fp32, rounded once (kernel `relu_squared`). The kernel replaces NaN by 0."""
    return _elementwise("relu_squared", x)


def _gated(name: str, x: torch.Tensor, *numbers: float) -> torch.Tensor:
    # The kernels ignore strides.
    x = packed(x)
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if out.numel():  # an empty grid is a launch error
        kernel(name)(out, x, *numbers)
    return out


def _elementwise(name: str, x: torch.Tensor) -> torch.Tensor:
    # The kernels ignore strides.
    x = packed(x)
    out = x.new_empty(x.shape)
    if out.numel():  # an empty grid is a launch error
        kernel(name)(out, x)
    return out


OPS = (
    implementation(silu_and_mul, "silu_and_mul"),
    implementation(gelu_and_mul, "gelu_and_mul", "gelu_tanh_and_mul"),
    implementation(swigluoai_and_mul, "swigluoai_and_mul"),
    implementation(silu_and_mul_with_clamp, "silu_and_mul_with_clamp"),
    implementation(mul_and_silu, "mul_and_silu"),
    implementation(fatrelu_and_mul, "fatrelu_and_mul"),
    implementation(gelu_new, "gelu_new", takes=ROWS),
    implementation(gelu_fast, "gelu_fast", takes=ROWS),
    implementation(quick_gelu, "gelu_quick", takes=ROWS),
    implementation(relu2, "relu_squared", takes=ROWS),
)
