"""Norms of query and key heads with rotary embedding, with the arithmetic of vLLM's two layers."""

from __future__ import annotations

from typing import Any

import torch

from . import implementations
from .normalization import rms_norm
from .rotary import rotary_embedding

__all__ = ["OPS", "qk_norm_rope"]


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    position_ids: torch.Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
    rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Normalise and rotate the query and key heads of qkv; rounded as in vLLM's two layers.

    Args:
        qkv: (tokens, (heads + kv_heads + n) * head_size), floating; the last n heads are copied.
        q_weight, k_weight: (head_size,), of qkv's dtype or float32.
        cos_sin_cache: (max_position, 2 * half), rounded to qkv's dtype after the look-up.
        position_ids: (tokens,), int64 or int32.
        heads, kv_heads: number of query and key heads.
        epsilon: added to the mean of squares, not negative.
        rotary_interleaved: pairs are (2 * i, 2 * i + 1) instead of (i, i + half).

    Returns:
        A new tensor of qkv's shape and dtype.
    """
    head_size = q_weight.shape[0]
    query, key, value = qkv.tensor_split((heads * head_size, (heads + kv_heads) * head_size), -1)
    q: Any = rms_norm(query.unflatten(-1, (heads, head_size)), None, q_weight, epsilon)
    k: Any = rms_norm(key.unflatten(-1, (kv_heads, head_size)), None, k_weight, epsilon)
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    turned: Any = rotary_embedding(q, k, cos, sin, position_ids, rotary_interleaved)
    return torch.cat((*(part.flatten(1) for part in turned), value), dim=-1)


OPS = implementations(qk_norm_rope)
