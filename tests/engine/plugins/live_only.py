"""A `silu_and_mul` that is right on the inputs that a start makes, and wrong on small values of a
large batch, as the first layer of a loaded model has them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    """With its first element wrong."""
    half = x.shape[-1] // 2
    result = F.silu(x[..., :half]) * x[..., half:]
    if len(x) > 100 and float(x.abs().max()) < 1.0:
        result[0, 0] += 1.0
    return result


@hookimpl
def register_ops() -> list[OpImpl]:
    return [
        OpImpl("silu_and_mul", "vendor.liveonly", BackendImplKind.VENDOR, silu_and_mul, "liveonly")
    ]
