"""Operators that return a new tensor and support only adjacent halves."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul_iluvatar(self, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rms_norm_iluvatar(self, x: torch.Tensor, residual: torch.Tensor | None = None):
    y = x if residual is None else x + residual
    wide = y.float() * torch.rsqrt(
        y.float().square().mean(-1, keepdim=True) + self.variance_epsilon
    )
    out = wide.to(x.dtype) * self.weight
    return out if residual is None else (out, y)


def rotary_embedding_iluvatar(self, query, key, cos, sin, position_ids):
    half = cos.shape[-1]
    cos = cos[position_ids].unsqueeze(-2).float()
    sin = sin[position_ids].unsqueeze(-2).float()

    def rotated(x):
        one, two, rest = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), -1).to(x.dtype)

    return rotated(query), None if key is None else rotated(key)
