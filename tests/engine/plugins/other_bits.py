"""Correct `silu_and_mul` that rounds differently in large batches, within the tolerance."""

from __future__ import annotations

import correct
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    result = correct.silu_and_mul(x.float())
    if x.ndim == 2 and len(x) > 16:
        result *= 1 + 2**-9
    return result.to(x.dtype)


register_ops = correct.registers("otherbits", silu_and_mul)
