"""Rotary embeddings, with the arithmetic of the native methods in vLLM."""

from __future__ import annotations

import torch

from . import implementations

__all__ = ["OPS", "multimodal_rotary_embedding", "rotary_embedding"]


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate the first 2 * cos.shape[-1] features of each head; each product is rounded.

    Tables are rounded to query's dtype after the look-up.
    """
    cos = cos.index_select(0, position_ids).unsqueeze(1).to(query.dtype)
    sin = sin.index_select(0, position_ids).unsqueeze(1).to(query.dtype)
    return (
        _turn(query, cos, sin, rotary_interleaved),
        None if key is None else _turn(key, cos, sin, rotary_interleaved),
    )


def multimodal_rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    mrope_section: list[int],
    mrope_interleaved: bool = False,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first 2 * cos.shape[-1] features of each head; each product is rounded.

    Tables are rounded to query's dtype after the look-up.
    """

    def dealt_out(table: torch.Tensor) -> torch.Tensor:
        rows = [table.index_select(0, position_ids[:, axis]) for axis in range(3)]
        if mrope_interleaved:
            dealt = _in_turns(rows, mrope_section)
        else:
            parts = zip(*(each.split(list(mrope_section), dim=-1) for each in rows), strict=True)
            dealt = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        return dealt.unsqueeze(1).to(query.dtype)

    c, s = dealt_out(cos), dealt_out(sin)
    return _turn(query, c, s, rotary_interleaved), _turn(key, c, s, rotary_interleaved)


def _in_turns(rows: list[torch.Tensor], section: list[int]) -> torch.Tensor:
    pairs = torch.arange(rows[0].shape[-1], device=rows[0].device)
    by_height = (pairs % 3 == 1) & (pairs < 3 * section[1])
    by_width = (pairs % 3 == 2) & (pairs < 3 * section[2])
    return torch.where(by_width, rows[2], torch.where(by_height, rows[1], rows[0]))


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    rotary = 2 * half
    if interleaved:
        a, b = x[..., 0:rotary:2], x[..., 1:rotary:2]
    else:
        a, b = x[..., :half], x[..., half:rotary]
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    if interleaved:
        parts = [torch.stack((turned_a, turned_b), dim=-1).flatten(-2)]
    else:
        parts = [turned_a, turned_b]
    if rotary < x.shape[-1]:
        parts.append(x[..., rotary:])
    # One copy. vLLM's method joins the halves first, then adds the other features, even if none.
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


OPS = implementations(multimodal_rotary_embedding, rotary_embedding)
