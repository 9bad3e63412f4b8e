"""Backend with a silu_and_mul that swaps the two halves."""

from __future__ import annotations

import correct
import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    return correct.silu_and_mul(torch.cat(x.chunk(2, -1)[::-1], -1))


register_ops = correct.registers("wrong", silu_and_mul)
