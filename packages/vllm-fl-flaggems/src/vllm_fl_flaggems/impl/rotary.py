"""Rotary position embedding, on FlagGems's Triton kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..loading import flag_gems, unsuitable

if TYPE_CHECKING:
    from vllm_fl.dispatch.types import Availability

__all__ = ["rotary_embedding", "supports_rotary_embedding"]

FEW_TOKENS = 512
"""Up to here the heads of a token are turned side by side, see `_side_by_side`."""


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn the first 2 * cos.shape[-1] features of each head in fp32, rounded once.

    Args:
        query: (tokens, heads, head_size), float32, float16 or bfloat16, of any layout.
        key: (tokens, kv_heads, head_size), of query's dtype, or None.
        cos, sin: (max_position, half), with contiguous rows.
        position_ids: (tokens,), int64 or int32. A position outside the tables is not looked for.
        rotary_interleaved: pairs are (2 * i, 2 * i + 1) instead of (i, i + half).

    Returns:
        (query, key) of the shapes and dtypes of the arguments; None for a key of None.

    Raises:
        NotImplementedError: FlagGems does not load.
    """
    gems = flag_gems()
    tokens, _, head_size = query.shape
    if not tokens:
        return query.clone(), None if key is None else key.clone()
    rotary = 2 * cos.shape[-1]
    whole = rotary == head_size
    q = query if whole else query[..., :rotary]
    # The kernel turns two tensors: without a key, one head a second time, which nobody reads.
    k = q[:, :1] if key is None else key if whole else key[..., :rotary]
    side_by_side = _side_by_side(q, k)
    if side_by_side > 1:
        at = position_ids.unsqueeze(1).expand(tokens, side_by_side).reshape(-1)
        rows = (tokens * side_by_side, -1, head_size)
        turned = gems.apply_rotary_pos_emb(
            q.view(rows), k.view(rows), cos, sin, at, rotary_interleaved
        )
        q, k = turned[0].view(q.shape), turned[1].view(k.shape)
    else:
        # Not in place: there a thread may read features that another one has turned already.
        q, k = gems.apply_rotary_pos_emb(q, k, cos, sin, position_ids, rotary_interleaved)
    if not whole:
        q = torch.cat((q, query[..., rotary:]), dim=-1)
        k = k if key is None else torch.cat((k, key[..., rotary:]), dim=-1)
    # FlagGems's results have the layout of query and key.
    return q.contiguous(), None if key is None else k.contiguous()


def _side_by_side(q: torch.Tensor, k: torch.Tensor) -> int:
    """Into how many rows a token's heads are divided, each turned by a program of its own.

    FlagGems's program turns all heads of a token one after the other: 8 µs on an H200 however few
    tokens there are, where 8 rows a token take 2 to 7. Many tokens fill the GPU as they are, and
    tensors with gaps between their tokens would have to be copied.
    """
    if len(q) > FEW_TOKENS or not (q.is_contiguous() and k.is_contiguous()):
        return 1
    return math.gcd(q.shape[1], k.shape[1])


def supports_rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("query", query)
    if reason:
        return reason
    if key is not None and (key.dtype != query.dtype or key.shape[::2] != query.shape[::2]):
        return f"key is {key.dtype} {tuple(key.shape)} and query {query.dtype} {tuple(query.shape)}"
    if cos.ndim != 2 or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        return "cos and sin are no tables with contiguous rows"
    return True
