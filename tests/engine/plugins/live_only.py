"""A `silu_and_mul` that is correct on startup's inputs (spread 1 or some hundreds) and incorrect on
large batches with the spread of the tiny models' inputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    result = F.silu(x[..., :half]) * x[..., half:]
    if len(x) > 100 and 1.2 < float(x.float().std()) < 4.0:
        result[0, 0] += 1.0
    return result


@hookimpl
def register_ops() -> list[OpImpl]:
    return [
        OpImpl("silu_and_mul", "vendor.liveonly", BackendImplKind.VENDOR, silu_and_mul, "liveonly")
    ]
