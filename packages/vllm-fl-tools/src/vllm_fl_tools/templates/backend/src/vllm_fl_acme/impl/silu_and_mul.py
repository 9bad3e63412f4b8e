"""The gated activation of SiLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_fl import Availability, OpImpl

from . import VENDOR, available, unsuitable

__all__ = ["IMPL", "silu_and_mul", "supports_silu_and_mul"]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] for x of shape (..., 2 * d)."""
    d = x.shape[-1] // 2
    x = x.contiguous()  # results are, whatever the layout of x
    gate, up = x[..., :d], x[..., d:]
    return F.silu(gate) * up


def supports_silu_and_mul(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail. Looks at neither values nor the number of tokens."""
    if reason := unsuitable("x", x):
        return reason
    return True if x.shape[-1] % 2 == 0 else f"the last dimension of x, {x.shape[-1]}, is odd"


IMPL = OpImpl(
    "silu_and_mul",
    *VENDOR,
    silu_and_mul,
    "acme",
    available=available,
    supports=supports_silu_and_mul,
)
