"""Rotary position embedding."""

from __future__ import annotations

import torch

from . import implementation

__all__ = ["IMPL", "rotary_embedding"]


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate the first 2 * cos.shape[-1] features of each head by its token's row of cos and sin.

    query and key are (tokens, heads, head_size). Pairs are (i, i + half), or (2 * i, 2 * i + 1) if
    rotary_interleaved.
    """
    c = cos.index_select(0, position_ids).unsqueeze(1).float()
    s = sin.index_select(0, position_ids).unsqueeze(1).float()
    turned = _turn(query, c, s, rotary_interleaved)
    return turned, None if key is None else _turn(key, c, s, rotary_interleaved)


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


IMPL = implementation(rotary_embedding)
