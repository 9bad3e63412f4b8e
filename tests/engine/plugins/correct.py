"""Correct kernels, which the plugins of this folder change, and the hook that registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return silu(x[..., :half]) * x[..., half:]


def rms_norm(
    x: Tensor, residual: Any, weight: Any, epsilon: float, variance_size: int | None = None
) -> Any:
    y = x.float() if residual is None else x.float() + residual.float()
    normed = y * torch.rsqrt(y[..., :variance_size].pow(2).mean(-1, keepdim=True) + epsilon)
    normed = normed if weight is None else normed.to(weight.dtype) * weight
    normed = normed.to(x.dtype)
    return normed if residual is None else (normed, y.to(x.dtype))


def registers(vendor: str, *functions: Callable[..., Any]) -> Callable[[], list[OpImpl]]:
    """The hook `register_ops` that provides these functions, which have the names of ops."""

    @hookimpl
    def register_ops() -> list[OpImpl]:
        kind = BackendImplKind.VENDOR
        return [OpImpl(fn.__name__, f"vendor.{vendor}", kind, fn, vendor) for fn in functions]

    return register_ops
