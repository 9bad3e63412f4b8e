"""Correct kernels, from which the wrong kernels are made.

The four ops here compute in fp32, round once, return new contiguous tensors, and raise on calls
that break the contract.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fl.plugins.registry import known_contracts


def of(op: str) -> Callable[..., Any]:
    """Return the correct kernel of an op: one of these, or the oracle with a rounded result."""
    return globals().get(op) or _rounded_oracle(op)


def oracle(op: str) -> Callable[..., Any]:
    """Return the oracle of an op."""
    return known_contracts().contracts[op].oracle


def checked(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel with the contract's signature, which raises for invalid arguments."""
    spec = known_contracts().contracts[op]

    @functools.wraps(spec.oracle)
    def kernel(*given: Any, **named: Any) -> Any:
        bound = spec.signature.bind(*given, **named)
        bound.apply_defaults()
        problem = spec.check(*bound.args)
        if problem is not None:
            raise ValueError(str(problem))
        return function(*bound.args)

    return kernel


def _rounded_oracle(op: str) -> Callable[..., Any]:
    spec = known_contracts().contracts[op]

    def rounded(*args: Any) -> Any:
        exact, like = spec.oracle(*args), spec.fake(*args)
        if not isinstance(exact, tuple):
            return _as(exact, like)
        if op.startswith("quant_"):  # the oracle returns values in the units of x
            exact = (_in_steps(exact[0], exact[1], like[0].dtype), *exact[1:])
        return tuple(map(_as, exact, like))

    return checked(op, rounded)


def _as(exact: Tensor, like: Tensor) -> Tensor:
    return exact.to(like.dtype).contiguous()


def _in_steps(exact: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Express numbers in steps of their scale."""
    if scale.numel() == 1:
        scale = scale.reshape(())
    else:
        scale = scale.repeat_interleave(exact.shape[-1] // max(1, scale.shape[-1]), dim=-1)
    steps = (exact / scale).nan_to_num()
    return steps if dtype.is_floating_point else steps.round()


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = _halves(x)
    return (F.silu(gate) * up).to(x.dtype).contiguous()


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up."""
    gate, up = _halves(x)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype).contiguous()


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y / sqrt(mean(y**2) + epsilon) * weight, where y = x + residual."""
    if not x.is_floating_point():
        raise TypeError("x is not floating")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError("residual is not of x's shape and dtype")
    if weight is not None and not (weight.shape == x.shape[-1:] and weight.is_floating_point()):
        raise ValueError("weight is not (hidden,), or not floating")
    if epsilon < 0 or (variance_size is not None and not 0 < variance_size <= x.shape[-1]):
        raise ValueError("epsilon or variance_size is out of range")
    y = x.float() if residual is None else x.float() + residual.float()
    variance = y[..., :variance_size].square().mean(dim=-1, keepdim=True)
    normed = y * torch.rsqrt(variance + epsilon)
    if weight is not None:
        normed = normed * weight.float()
    out = normed.to(x.dtype).contiguous()
    if residual is None:
        return out
    return out, y.to(x.dtype).contiguous()


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate pairs of features by the row of cos and sin at the position of the token."""
    if not query.is_floating_point() or position_ids.is_floating_point():
        raise TypeError("query is not floating, or position_ids is")
    if query.ndim != 3 or position_ids.shape != query.shape[:1]:
        raise ValueError("query is not (tokens, heads, head_size), or position_ids not (tokens,)")
    if key is not None and (key.dtype != query.dtype or key.shape[::2] != query.shape[::2]):
        raise ValueError("key is not of query's dtype, tokens and head_size")
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > query.shape[2]:
        raise ValueError("cos and sin are not (max_position, half) with 2 * half <= head_size")
    c = cos.index_select(0, position_ids).unsqueeze(1).float()
    s = sin.index_select(0, position_ids).unsqueeze(1).float()
    turned = _turn(query, c, s, rotary_interleaved)
    return turned, None if key is None else _turn(key, c, s, rotary_interleaved)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    if not x.is_floating_point():
        raise TypeError("x is not floating")
    if x.shape[-1] % 2:
        raise ValueError("x has an odd last dimension")
    half = x.shape[-1] // 2
    return x[..., :half].float(), x[..., half:].float()


def _turn(x: Tensor, c: Tensor, s: Tensor, interleaved: bool) -> Tensor:
    half = c.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first].float(), x[..., second].float()
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., first] = (a * c - b * s).to(x.dtype)
    out[..., second] = (b * c + a * s).to(x.dtype)
    return out
