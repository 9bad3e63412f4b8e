"""Implementations with fewer or more trailing parameters than their contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch import BackendImplKind, OpImpl, OpRegistry

__all__ = ["LACKS", "held", "of", "rms_norm", "rotary_embedding"]


def of(op: str, fn: Callable[..., Any], name: str = "acme", **fields: Any) -> OpImpl:
    return OpImpl(op, f"vendor.{name}", BackendImplKind.VENDOR, fn, name, **fields)


def held(impl: OpImpl) -> OpImpl:
    """Register `impl` and return what the registry stores."""
    registry = OpRegistry()
    registry.register_impl(impl)
    found = registry.get_implementation(impl.op_name, impl.impl_id)
    assert isinstance(found, OpImpl)
    return found


# Signatures from the documentation of vllm-plugin-FL.


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    y = x if residual is None else x + residual
    scale = torch.rsqrt(y.float().square().mean(-1, keepdim=True) + epsilon)
    out = (y.float() * scale).to(x.dtype)
    out = out if weight is None else (out * weight).to(x.dtype)
    return out if residual is None else (out, y)


def rotary_embedding(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
    c, s = (table[position_ids].unsqueeze(-2).float() for table in (cos, sin))
    half = c.shape[-1]

    def rotate(x: Any) -> Any:
        if x is None:
            return None
        one, two, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat((one * c - two * s, two * c + one * s, rest), -1).to(x.dtype)

    return rotate(query), rotate(key)


# Implementations of `grown`, a contract that gained parameters of every kind.


def of_first(x: Tensor, shift: float) -> Tensor:
    return x + shift


def with_mode(x: Tensor, shift: float, mode: str = "none") -> Tensor:
    return -(x + shift) if mode == "negate" else x + shift


def by_name(x: Tensor, shift: float, *, mode: str = "none", flip: bool = False) -> Tensor:
    out = with_mode(x, shift, mode)
    return out.flip(-1) if flip else out


def all_by_name(
    x: Tensor,
    shift: float,
    *,
    mode: str = "none",
    flip: bool = False,
    factor: float = 0.1,
    bias: Tensor | None = None,
) -> Tensor:
    out = by_name(x, shift, mode=mode, flip=flip) * factor * 10
    return out if bias is None else out + bias


def newer(
    x: Tensor,
    shift: float,
    mode: str = "none",
    flip: bool = False,
    factor: float = 0.1,
    bias: Tensor | None = None,
    power: int = 1,
    *,
    offsets: Tensor | None = None,
    how: str = "fast",
) -> Tensor:
    assert (power, offsets, how) == (1, None, "fast")
    return all_by_name(x, shift, mode=mode, flip=flip, factor=factor, bias=bias)


LACKS = [
    (of_first, ["mode", "flip", "factor", "bias"]),
    (with_mode, ["flip", "factor", "bias"]),
    (by_name, ["factor", "bias"]),
    (all_by_name, []),
    (newer, []),
]
