"""Rotary position embedding."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, available, elsewhere, unsuitable

__all__ = ["IMPL", "rotary_embedding", "supports_rotary_embedding"]


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn the first 2 * cos.shape[-1] features of each head by its token's row of cos and sin.

    query and key are (tokens, heads, head_size). A pair is (i, i + half), or (2 * i, 2 * i + 1)
    with rotary_interleaved.
    """
    c = cos.index_select(0, position_ids).unsqueeze(1).float()
    s = sin.index_select(0, position_ids).unsqueeze(1).float()
    turned = _turn(query, c, s, rotary_interleaved)
    return turned, None if key is None else _turn(key, c, s, rotary_interleaved)


def supports_rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> Availability:
    """True, or why the kernel would fail. Looks at neither values nor the number of tokens."""
    if query.ndim != 3 or position_ids.shape != query.shape[:1]:
        return "query is not (tokens, heads, head_size), or position_ids not (tokens,)"
    if key is not None and (key.dtype != query.dtype or key.shape[::2] != query.shape[::2]):
        return "key is not of query's dtype, tokens and head_size"
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > query.shape[2]:
        return "cos and sin are not (max_position, half) with 2 * half <= head_size"
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in (query.dtype, torch.float32):
            return f"{name} is {table.dtype}, neither {query.dtype} nor torch.float32"
    if position_ids.dtype not in (torch.int64, torch.int32):
        return f"position_ids is {position_ids.dtype}, neither torch.int64 nor torch.int32"
    if reason := elsewhere(query, key=key, cos=cos, sin=sin, position_ids=position_ids):
        return reason
    return unsuitable("query", query) or True


def _turn(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = c.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first].float(), x[..., second].float()
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out


IMPL = OpImpl(
    "rotary_embedding",
    *VENDOR,
    rotary_embedding,
    "acme",
    available=available,
    supports=supports_rotary_embedding,
)
