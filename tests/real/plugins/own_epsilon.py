"""Backend with norms that use OWN_EPSILON instead of the model's epsilon."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl

EPSILON = float(os.environ["OWN_EPSILON"])


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    y = x.float() if residual is None else x.float() + residual.float()
    variance = y[..., :variance_size].square().mean(-1, keepdim=True)
    normed = y * torch.rsqrt(variance + EPSILON)
    if weight is not None:
        normed = normed.to(weight.dtype) * weight
    normed = normed.to(x.dtype)
    return normed if residual is None else (normed, y.to(x.dtype))


@hookimpl
def register_ops() -> list[OpImpl]:
    kind = BackendImplKind.VENDOR
    return [OpImpl("rms_norm", "vendor.ownepsilon", kind, rms_norm, "ownepsilon")]
