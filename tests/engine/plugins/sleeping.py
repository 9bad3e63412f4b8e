"""A backend whose silu_and_mul is right, and takes two milliseconds longer than it needs."""

from __future__ import annotations

import time

import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    time.sleep(0.002)
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


@hookimpl
def register_ops() -> list[OpImpl]:
    fn = silu_and_mul
    return [OpImpl("silu_and_mul", "vendor.sleeping", BackendImplKind.VENDOR, fn, "sleeping")]
