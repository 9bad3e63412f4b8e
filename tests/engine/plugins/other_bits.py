"""Correct `silu_and_mul` that rounds differently in large batches, within the tolerance."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    result = F.silu(x[..., :half].float()) * x[..., half:].float()
    if x.ndim == 2 and len(x) > 16:
        result *= 1 + 2**-9
    return result.to(x.dtype)


@hookimpl
def register_ops() -> list[OpImpl]:
    return [
        OpImpl(
            "silu_and_mul", "vendor.otherbits", BackendImplKind.VENDOR, silu_and_mul, "otherbits"
        )
    ]
