"""Backend with a different fault in each implementation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    """Incorrect in bf16 only."""
    half = x.shape[-1] // 2
    result = F.silu(x[..., :half]) * x[..., half:]
    return result * 1.2 if x.dtype is torch.bfloat16 else result


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Raises the error of a kernel that cannot be launched."""
    raise RuntimeError("no kernel image is available for execution on the device")


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Any:
    """Incorrect above 64 tokens."""
    y = x.float() if residual is None else x.float() + residual.float()
    variance = y[..., :variance_size].pow(2).mean(-1, keepdim=True)
    normed = y * torch.rsqrt(variance + epsilon)
    normed = normed if weight is None else normed.to(weight.dtype) * weight
    normed = normed.to(x.dtype)
    if len(x) > 64:
        normed[64:] = 0
    return normed if residual is None else (normed, y.to(x.dtype))


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    return query * float("nan"), None if key is None else key * float("nan")


@hookimpl
def register_ops() -> list[OpImpl]:
    functions = (silu_and_mul, gelu_and_mul, rms_norm, rotary_embedding)
    return [
        OpImpl(f.__name__, "vendor.faulty", BackendImplKind.VENDOR, f, "faulty") for f in functions
    ]
