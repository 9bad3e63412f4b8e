"""A backend that fails on rank 1 only: `RANK_ONE` says how (`wrong`, or `dies`)."""

from __future__ import annotations

import os

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    result = F.silu(x[..., :half]) * x[..., half:]
    if dist.is_initialized() and dist.get_rank() == 1:
        if os.environ["RANK_ONE"] == "dies":
            os._exit(3)
        return result + 1
    return result


@hookimpl
def register_ops() -> list[OpImpl]:
    return [
        OpImpl("silu_and_mul", "vendor.rankone", BackendImplKind.VENDOR, silu_and_mul, "rankone")
    ]
