"""Rotary position embedding, on vLLM's CUDA kernel."""

from __future__ import annotations

import torch

from vllm_fl_ops.contracts.cos_sin import adjacent, joint_cos_sin

from . import implementation, kernel

__all__ = ["OPS", "rotary_embedding"]


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate the first 2 * cos.shape[-1] features of each head in fp32, rounded once.

    The kernel works in place: query and key may be overwritten.

    Args:
        query: (tokens, heads, head_size), float32, float16 or bfloat16, of any layout.
        key: (tokens, kv_heads, head_size), of query's dtype, kv_heads a divisor of heads, or None.
        cos, sin: (max_position, half), adjacent halves of one cache.
        position_ids: (tokens,), int64 or int32. Positions outside the cache are not detected.
        rotary_interleaved: pairs are (2 * i, 2 * i + 1) instead of (i, i + half).

    Returns:
        (query, key) with the shapes and dtypes of the arguments; key is None if it was.

    Raises:
        RuntimeError: cos and sin are not adjacent, or the kernel rejects a dtype.
    """
    tokens, _, head_size = query.shape
    query, rows = _rows(query)
    key, key_rows = (None, None) if key is None else _rows(key)
    if tokens:  # the kernel divides by the number of tokens
        if position_ids.dtype is not torch.int64 or not position_ids.is_contiguous():
            position_ids = position_ids.long().contiguous()
        cache = joint_cos_sin(cos, sin)
        kernel("rotary_embedding")(
            position_ids, rows, key_rows, head_size, cache, not rotary_interleaved
        )
    return query, key


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x or a packed copy of it, a view of that as (tokens, heads * head_size)).

    The kernel supports any token stride. Its head stride is query's, also for key; with two
    dimensions it is the head's size, which is correct for both.
    """
    tokens, heads, head_size = x.shape
    width = heads * head_size
    step, head_step, feature_step = x.stride()
    # A step below the width: tokens share memory, as in an expanded tensor.
    if feature_step != 1 or head_step != head_size or step < width:
        x = x.clone(memory_format=torch.contiguous_format)
    return x, x.view(tokens, width)


OPS = (
    implementation(
        rotary_embedding,
        "rotary_embedding",
        takes=("key is None or heads % kv_heads == 0", adjacent),
        consumes=("query", "key"),
    ),
)
