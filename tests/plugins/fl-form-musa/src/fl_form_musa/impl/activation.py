from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul_musa(obj, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]
