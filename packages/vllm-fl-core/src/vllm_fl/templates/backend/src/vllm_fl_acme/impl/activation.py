"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_fl import Availability, OpImpl

from . import VENDOR, available, unsuitable

__all__ = [
    "OPS",
    "gelu_and_mul",
    "silu_and_mul",
    "supports_gelu_and_mul",
    "supports_silu_and_mul",
]


# [[ silu_and_mul ]]
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] for x of shape (..., 2 * d)."""
    d = x.shape[-1] // 2
    x = x.contiguous()  # results are, whatever the layout of x
    gate, up = x[..., :d], x[..., d:]
    return F.silu(gate) * up


def supports_silu_and_mul(x: torch.Tensor) -> Availability:
    """True, or why the kernel would fail. Looks at neither values nor the number of tokens."""
    return _supports(x)


# [[ end ]]
# [[ gelu_and_mul ]]
def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:] for x of shape (..., 2 * d); approximate: "none" or "tanh"."""
    d = x.shape[-1] // 2
    x = x.contiguous()  # results are, whatever the layout of x
    gate, up = x[..., :d], x[..., d:]
    return F.gelu(gate, approximate=approximate) * up


def supports_gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> Availability:
    """True, or why the kernel would fail."""
    if approximate not in ("none", "tanh"):
        return f"no kernel for approximate={approximate!r}"
    return _supports(x)


# [[ end ]]
def _supports(x: torch.Tensor) -> Availability:
    reason = unsuitable("x", x)
    if reason:
        return reason
    return True if x.shape[-1] % 2 == 0 else f"the last dimension of x, {x.shape[-1]}, is odd"


OPS = (
    # [[ silu_and_mul ]]
    OpImpl(
        "silu_and_mul",
        *VENDOR,
        silu_and_mul,
        "acme",
        available=available,
        supports=supports_silu_and_mul,
    ),
    # [[ end ]]
    # [[ gelu_and_mul ]]
    OpImpl(
        "gelu_and_mul",
        *VENDOR,
        gelu_and_mul,
        "acme",
        available=available,
        supports=supports_gelu_and_mul,
    ),
    # [[ end ]]
)
