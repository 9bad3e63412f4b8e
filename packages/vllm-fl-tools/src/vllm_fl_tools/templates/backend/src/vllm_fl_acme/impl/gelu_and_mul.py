"""The gated activation of GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_fl import Availability, OpImpl

from . import VENDOR, available, unsuitable

__all__ = ["IMPL", "gelu_and_mul", "supports_gelu_and_mul"]


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:] for x of shape (..., 2 * d); approximate: "none" or "tanh"."""
    d = x.shape[-1] // 2
    x = x.contiguous()  # results are, whatever the layout of x
    gate, up = x[..., :d], x[..., d:]
    return F.gelu(gate, approximate=approximate) * up


def supports_gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> Availability:
    """True, or why the kernel would fail. Looks at neither values nor the number of tokens."""
    if approximate not in ("none", "tanh"):
        return f"no kernel for approximate={approximate!r}"
    if reason := unsuitable("x", x):
        return reason
    return True if x.shape[-1] % 2 == 0 else f"the last dimension of x, {x.shape[-1]}, is odd"


IMPL = OpImpl(
    "gelu_and_mul",
    *VENDOR,
    gelu_and_mul,
    "acme",
    available=available,
    supports=supports_gelu_and_mul,
)
