"""Normalisations, equal to the PyTorch code in vLLM's layers and in its IR (`rms_norm`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import implementations

__all__ = ["OPS", "layer_norm", "rms_norm", "rms_norm_gated"]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, in the wider dtype of x and weight."""
    wide = x if weight is None else x.to(torch.promote_types(x.dtype, weight.dtype))
    return F.layer_norm(wide, x.shape[-1:], weight, bias, epsilon).to(x.dtype)


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y * rsqrt(mean(y**2) + epsilon) * weight in fp32, with y = x + residual.

    The normed fp32 value is rounded to weight's dtype before the product with the weight.
    """
    dtype = x.dtype
    y = x.to(torch.float32)
    if residual is not None:
        y = y + residual.to(torch.float32)
        residual = y.to(dtype)
    head = y if variance_size is None else y[..., :variance_size]
    variance = head.pow(2).mean(dim=-1, keepdim=True)
    normed = y * torch.rsqrt(variance + epsilon)
    if weight is not None:
        normed = normed.to(weight.dtype) * weight
    normed = normed.to(dtype)
    return normed if residual is None else (normed, residual)


def rms_norm_gated(
    x: torch.Tensor,
    z: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "swish",
) -> torch.Tensor:
    """norm(x) * act(z), or norm(x * act(z)), in fp32, rounded once."""
    gate = None if z is None else ACTIVATIONS[activation](z.float())
    y = x.float()
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = y if group_size is None else y.unflatten(-1, (-1, group_size))
    groups = groups * torch.rsqrt(groups.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    y = groups if group_size is None else groups.flatten(-2)
    y = y * weight.float()
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
}


OPS = implementations(layer_norm, rms_norm, rms_norm_gated)
