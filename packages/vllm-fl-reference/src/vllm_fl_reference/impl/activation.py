"""Activations, equal to the PyTorch code in vLLM's layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from . import implementations

__all__ = [
    "OPS",
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "gelu_fast",
    "gelu_new",
    "mul_and_silu",
    "quick_gelu",
    "relu2",
    "silu_and_mul",
    "silu_and_mul_with_clamp",
    "swigluoai_and_mul",
    "xielu",
]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:]; silu is rounded to x's dtype before the product."""
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:]; gelu is rounded to x's dtype before the product."""
    d = x.shape[-1] // 2
    return F.gelu(x[..., :d], approximate=approximate) * x[..., d:]


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped pairs; every step is rounded."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta) of clamped halves; every step is rounded."""
    d = x.shape[-1] // 2
    gate = x[..., :d].clamp(max=limit)
    up = x[..., d:].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x[..., :d] * silu(x[..., d:]); silu is rounded to x's dtype before the product."""
    d = x.shape[-1] // 2
    return x[..., :d] * F.silu(x[..., d:])


def fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """gate * x[..., d:]; gate is x[..., :d] if above the threshold, otherwise 0."""
    d = x.shape[-1] // 2
    return F.threshold(x[..., :d], threshold, 0.0) * x[..., d:]


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU with tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)); every step is rounded."""
    c = math.sqrt(2.0 / math.pi)
    return 0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """GELU with tanh(0.7978845608 * x * (1 + 0.044715 * x**2)); every step is rounded."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x); every step is rounded."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)**2, rounded once."""
    return torch.square(F.relu(x))


def gelu_and_mul_sparse(
    x: torch.Tensor, std_multiplier: float, approximate: str = "none"
) -> torch.Tensor:
    """gelu(relu(x[..., :d] - cutoff)) * x[..., d:]; every step is rounded.

    The cutoff is mean + std_multiplier * standard deviation of the row x[..., :d].
    """
    d = x.shape[-1] // 2
    gate = x[..., :d]
    mean = torch.mean(gate, dim=-1, keepdim=True)
    std = torch.std(gate, dim=-1, keepdim=True, unbiased=False)
    above = F.relu(gate - (mean + std * std_multiplier))
    return F.gelu(above, approximate=approximate) * x[..., d:]


def xielu(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
) -> torch.Tensor:
    """p * x**2 + beta * x if x > 0, otherwise n * (expm1(min(x, eps)) - x) + beta * x.

    p is softplus(alpha_p), n is beta + softplus(alpha_n); every step is rounded.
    """
    positive, negative = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    result = torch.where(
        x > 0,
        positive * x * x + beta * x,
        (torch.expm1(torch.min(x, eps)) - x) * negative + beta * x,
    )
    return result.to(x.dtype)  # fp16 with bf16 promotes to float32


OPS = implementations(
    silu_and_mul,
    gelu_and_mul,
    swigluoai_and_mul,
    silu_and_mul_with_clamp,
    mul_and_silu,
    fatrelu_and_mul,
    gelu_new,
    gelu_fast,
    quick_gelu,
    relu2,
    gelu_and_mul_sparse,
    xielu,
)
