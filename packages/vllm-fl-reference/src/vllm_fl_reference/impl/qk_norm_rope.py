"""Norms of query and key heads with rotary embedding."""

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

    The table is rounded to qkv's dtype after the look-up.
    """
    head_size = q_weight.shape[0]
    query, key, value = qkv.tensor_split((heads * head_size, (heads + kv_heads) * head_size), -1)
    q: Any = rms_norm(query.unflatten(-1, (heads, head_size)), None, q_weight, epsilon)
    k: Any = rms_norm(key.unflatten(-1, (kv_heads, head_size)), None, k_weight, epsilon)
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    turned: Any = rotary_embedding(q, k, cos, sin, position_ids, rotary_interleaved)
    return torch.cat((*(part.flatten(1) for part in turned), value), dim=-1)


OPS = implementations(qk_norm_rope)
