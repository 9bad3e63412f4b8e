"""Backend with a different fault in each implementation."""

from __future__ import annotations

from typing import Any

import correct
import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """Incorrect in bf16 only."""
    result = correct.silu_and_mul(x)
    return result * 1.2 if x.dtype is torch.bfloat16 else result


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Raises the error of a kernel that cannot be launched."""
    raise RuntimeError("no kernel image is available for execution on the device")


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
    """Incorrect above 64 tokens."""
    result = correct.rms_norm(x, residual, weight, epsilon, variance_size)
    if len(x) > 64:
        (result if residual is None else result[0])[64:] = 0
    return result


def rotary_embedding(
    query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, rotary_interleaved: bool = False
) -> tuple[Tensor, Tensor | None]:
    return query * float("nan"), None if key is None else key * float("nan")


register_ops = correct.registers("faulty", silu_and_mul, gelu_and_mul, rms_norm, rotary_embedding)
