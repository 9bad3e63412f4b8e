"""Rotary position embedding, on vLLM's C++ CPU kernel."""

from __future__ import annotations

import torch

from vllm_fl_ops.contracts.cos_sin import adjacent, joint_cos_sin

from . import ALIGNMENT, LANES, implementation, kernel

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

    bfloat16 results are truncated if `cuts_off` is true, like vLLM's own. The kernel works in
    place, and may overwrite query and key.

    Args:
        query: (tokens, heads, head_size), float32, float16 or bfloat16, any layout.
        key: (tokens, kv_heads, head_size), with query's dtype, or None.
        cos, sin: (max_position, half) with query's dtype, adjacent halves of one cache.
        position_ids: (tokens,), int64 or int32. Not checked against the size of the cache.
        rotary_interleaved: pairs are (2 * i, 2 * i + 1) instead of (i, i + half).

    Returns:
        (query, key) with the shapes and dtypes of the arguments; key is None if it was None.

    Raises:
        RuntimeError: cos and sin are not adjacent, or the kernel rejects a dtype.
    """
    cache = joint_cos_sin(cos, sin)
    query, rows = _rows(query)
    key, key_rows = (None, None) if key is None else _rows(key)
    kernel("rotary_embedding")(
        position_ids.long().contiguous(),
        rows,
        key_rows,
        query.shape[-1],
        cache,
        not rotary_interleaved,
    )
    return query, key


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x or a packed copy, its view as (tokens, heads * head_size)).

    The kernel uses the token stride and assumes that heads are packed. With three dimensions it
    would count one token per head, and read positions past the end.
    """
    tokens, heads, head_size = x.shape
    width = heads * head_size
    step, head_step, feature_step = x.stride()
    in_place = (
        feature_step == 1
        and head_step == head_size
        and step >= width  # otherwise tokens share memory (expanded tensors)
        and (step * x.itemsize) % ALIGNMENT == 0
        and x.data_ptr() % ALIGNMENT == 0
    )
    if not in_place:
        x = x.clone(memory_format=torch.contiguous_format)
    return x, x.view(tokens, width)


OPS = (
    implementation(
        rotary_embedding,
        "rotary_embedding",
        takes=(
            "cos.dtype == query.dtype",
            adjacent,
            # The kernel stores such heads with aligned instructions.
            "query.dtype != torch.bfloat16 or rotary_interleaved"
            f" or (half % {LANES} == 0 and head_size % {LANES} == 0)",
        ),
        consumes=("query", "key"),
    ),
)
