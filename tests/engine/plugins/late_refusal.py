"""Correct norm that does not support any call once requests are served."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Any:
    if is_forward_context_available() and get_forward_context().attn_metadata:
        raise NotImplementedError("not while it serves")
    y = x.float() if residual is None else x.float() + residual.float()
    normed = y * torch.rsqrt(y[..., :variance_size].pow(2).mean(-1, keepdim=True) + epsilon)
    normed = normed if weight is None else normed.to(weight.dtype) * weight
    normed = normed.to(x.dtype)
    return normed if residual is None else (normed, y.to(x.dtype))


@hookimpl
def register_ops() -> list[OpImpl]:
    return [OpImpl("rms_norm", "vendor.late", BackendImplKind.VENDOR, rms_norm, "late")]
