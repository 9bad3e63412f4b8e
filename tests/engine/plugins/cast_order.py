"""Norm that multiplies by its weight before it rounds: correct, but with other bits than vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Any:
    """vLLM's norm with one cast moved."""
    y = x.float() if residual is None else x.float() + residual.float()
    variance = y[..., :variance_size].pow(2).mean(-1, keepdim=True)
    normed = y * torch.rsqrt(variance + epsilon)
    normed = (normed if weight is None else normed * weight.float()).to(x.dtype)
    return normed if residual is None else (normed, y.to(x.dtype))


@hookimpl
def register_ops() -> list[OpImpl]:
    return [OpImpl("rms_norm", "vendor.castorder", BackendImplKind.VENDOR, rms_norm, "castorder")]
