"""Activations, as vLLM's layers compute them in PyTorch."""

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
    """silu(x[..., :d]) * x[..., d:]; silu is rounded to x's dtype before the product.

    Args:
        x: (..., 2 * d), floating.

    Returns:
        (..., d), of x's dtype.

    Raises:
        ValueError: the last dimension of x is odd.
        RuntimeError: x is not floating.
    """
    _refuse_silent_mistakes(x)
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:]; gelu is rounded to x's dtype before the product.

    Args:
        x: (..., 2 * d), floating.
        approximate: "none" (erf) or "tanh".

    Returns:
        (..., d), of x's dtype.

    Raises:
        ValueError: the last dimension of x is odd.
        RuntimeError: x is not floating, or `approximate` is another word.
    """
    _refuse_silent_mistakes(x)
    d = x.shape[-1] // 2
    return F.gelu(x[..., :d], approximate=approximate) * x[..., d:]


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped pairs; every step is rounded.

    Args:
        x: (..., 2 * d), floating: gate and up projection take turns.
        alpha: a finite number.
        limit: a finite number above 0: the largest gate, and how far up lies from 0 at most.

    Returns:
        (..., d), of x's dtype.

    Raises:
        TypeError: x is not floating, or alpha or limit no number.
        ValueError: the last dimension of x is odd, or alpha or limit is out of its range.
    """
    _refuse_silent_mistakes(x)
    _refuse_integers(x)
    if not -math.inf < alpha < math.inf or not 0 < limit < math.inf:  # isfinite cannot be traced
        raise ValueError(f"alpha must be finite, limit finite and above 0, got {alpha} and {limit}")
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta) of clamped halves; every step is rounded.

    Args:
        x: (..., 2 * d), floating: gate, then up projection.
        limit: a finite number above 0: the largest gate, and how far up lies from 0 at most.
        alpha: a finite number.
        beta: a finite number.

    Returns:
        (..., d), of x's dtype.

    Raises:
        TypeError: x is not floating, or limit, alpha or beta no number.
        ValueError: the last dimension of x is odd, or limit, alpha or beta is out of its range.
    """
    _refuse_silent_mistakes(x)
    _refuse_integers(x)
    if not 0 < limit < math.inf:
        raise ValueError(f"limit must be finite and above 0, got {limit}")
    if not (-math.inf < alpha < math.inf and -math.inf < beta < math.inf):
        raise ValueError(f"alpha and beta must be finite, got {alpha} and {beta}")
    d = x.shape[-1] // 2
    gate = x[..., :d].clamp(max=limit)
    up = x[..., d:].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x[..., :d] * silu(x[..., d:]); silu is rounded to x's dtype before the product.

    Args:
        x: (..., 2 * d), floating.

    Returns:
        (..., d), of x's dtype.

    Raises:
        ValueError: the last dimension of x is odd.
        RuntimeError: x is not floating.
    """
    _refuse_silent_mistakes(x)
    d = x.shape[-1] // 2
    return x[..., :d] * F.silu(x[..., d:])


def fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """gate * x[..., d:], where gate is x[..., :d] above the threshold and 0 elsewhere.

    Args:
        x: (..., 2 * d), floating.
        threshold: a finite number.

    Returns:
        (..., d), of x's dtype.

    Raises:
        TypeError: x is not floating, or threshold no number.
        ValueError: the last dimension of x is odd, or threshold is not finite.
    """
    _refuse_silent_mistakes(x)
    _refuse_integers(x)
    if not -math.inf < threshold < math.inf:
        raise ValueError(f"threshold must be finite, got {threshold}")
    d = x.shape[-1] // 2
    return F.threshold(x[..., :d], threshold, 0.0) * x[..., d:]


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)); every step is rounded.

    Args:
        x: floating, of any shape.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: x is not floating.
    """
    _refuse_integers(x)
    c = math.sqrt(2.0 / math.pi)
    return 0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh(0.7978845608 * x * (1 + 0.044715 * x**2)); every step is rounded.

    Args:
        x: floating, of any shape.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: x is not floating.
    """
    _refuse_integers(x)
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x); every step is rounded.

    Args:
        x: floating, of any shape.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: x is not floating.
    """
    _refuse_integers(x)
    return x * torch.sigmoid(1.702 * x)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)**2, rounded once.

    Args:
        x: floating, of any shape.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: x is not floating.
    """
    _refuse_integers(x)
    return torch.square(F.relu(x))


def gelu_and_mul_sparse(
    x: torch.Tensor, std_multiplier: float, approximate: str = "none"
) -> torch.Tensor:
    """gelu of what of x[..., :d] lies above a cutoff, times x[..., d:]; every step is rounded.

    The cutoff is the row's mean and `std_multiplier` times its deviation.

    Args:
        x: (..., 2 * d), floating.
        std_multiplier: a finite number, or a tensor with one.
        approximate: "none" (erf) or "tanh".

    Returns:
        (..., d), of x's dtype.

    Raises:
        TypeError: std_multiplier is no number.
        ValueError: the last dimension of x is odd, or std_multiplier is not finite.
        RuntimeError: x is not floating, or `approximate` is another word.
    """
    _refuse_silent_mistakes(x)
    if not isinstance(std_multiplier, torch.Tensor) and not -math.inf < std_multiplier < math.inf:
        raise ValueError(f"std_multiplier must be finite, got {std_multiplier}")
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
    """p * x**2 + beta * x above 0, n * (expm1(min(x, eps)) - x) + beta * x elsewhere.

    p is softplus(alpha_p), n is beta + softplus(alpha_n); every step is rounded.

    Args:
        x: floating, of any shape.
        alpha_p: one element, of x's dtype or bfloat16.
        alpha_n: the same.
        beta: the same.
        eps: the same.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: x is not floating, or another argument is no tensor of such a dtype.
        ValueError: another argument has not one element.
    """
    _refuse_integers(x)
    for name, one in {"alpha_p": alpha_p, "alpha_n": alpha_n, "beta": beta, "eps": eps}.items():
        if not isinstance(one, torch.Tensor) or one.dtype not in (x.dtype, torch.bfloat16):
            raise TypeError(f"{name} must be a tensor of {x.dtype} or bfloat16, got {one}")
        if one.numel() != 1:
            raise ValueError(f"{name} must have one element, got {one.numel()}")
    positive, negative = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    result = torch.where(
        x > 0,
        positive * x * x + beta * x,
        (torch.expm1(torch.min(x, eps)) - x) * negative + beta * x,
    )
    return result.to(x.dtype)  # of fp16 and bf16 together float32 has come


def _refuse_integers(x: torch.Tensor) -> None:
    if not x.is_floating_point():  # some steps would take them, and others turn them into float32
        raise TypeError(f"x must be floating, got {x.dtype}")


def _refuse_silent_mistakes(x: torch.Tensor) -> None:
    if x.shape[-1] % 2:  # three features would broadcast: one gate for two of them
        raise ValueError(f"x must have an even last dimension, got {x.shape[-1]}")


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
