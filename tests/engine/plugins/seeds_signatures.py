"""Operators with the parameters of the first documentation, without those added since."""

from __future__ import annotations

from typing import Any

import torch

from vllm_fl.plugins.types import BackendImplKind, BackendPriority, OpImpl


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    y = x if residual is None else x + residual
    wide = y.float() * torch.rsqrt(y.float().square().mean(-1, keepdim=True) + epsilon)
    out = wide.to(x.dtype)
    out = out if weight is None else (out * weight).to(x.dtype)
    return out if residual is None else (out, y)


def rotary_embedding(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
    half = cos.shape[-1]
    cos, sin = (table[position_ids].unsqueeze(-2).float() for table in (cos, sin))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        one, two, rest = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), -1).to(x.dtype)

    return rotated(query), None if key is None else rotated(key)


def register_builtins(registry: Any) -> None:
    registry.register_many(
        [
            OpImpl(
                op_name=fn.__name__,
                impl_id="vendor.seeds",
                kind=BackendImplKind.VENDOR,
                fn=fn,
                vendor="seeds",
                priority=BackendPriority.VENDOR,
            )
            for fn in (silu_and_mul, rms_norm, rotary_embedding)
        ]
    )
