"""Backend with a silu_and_mul that swaps the two halves."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x[..., :half] * F.silu(x[..., half:])


@hookimpl
def register_ops() -> list[OpImpl]:
    return [OpImpl("silu_and_mul", "vendor.wrong", BackendImplKind.VENDOR, silu_and_mul, "wrong")]
