"""A backend whose silu_and_mul is off by a share of its result, in the second layer alone."""

from __future__ import annotations

import os
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl

OFF_BY = float(os.environ.get("ONE_LAYER_IS_OFF_BY", "0"))

layers: list[int] = []
"""The ids of the layers that have called, in the order of the first forward pass."""


def silu_and_mul(obj: Any, x: Tensor) -> Tensor:
    if id(obj) not in layers:
        layers.append(id(obj))
    half = x.shape[-1] // 2
    result = F.silu(x[..., :half]) * x[..., half:]
    return result * (1 + OFF_BY) if layers.index(id(obj)) == 1 else result


@hookimpl
def register_ops() -> list[OpImpl]:
    fn = silu_and_mul
    return [OpImpl("silu_and_mul", "vendor.onelayer", BackendImplKind.VENDOR, fn, "onelayer")]
