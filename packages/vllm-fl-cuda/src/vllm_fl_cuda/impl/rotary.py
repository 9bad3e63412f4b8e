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

    The kernel works in place. Positions outside the cache are not detected. RuntimeError if cos and
    sin are not adjacent halves of one cache, or the kernel rejects a dtype.
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
    """Return (x or a packed copy, its view as (tokens, heads * head_size)).

    The kernel supports any token stride. For key it uses the head stride of query; with two
    dimensions it uses the head's size for both, which is correct.
    """
    tokens, heads, head_size = x.shape
    width = heads * head_size
    step, head_step, feature_step = x.stride()
    # A step below the width means that tokens share memory, as in an expanded tensor.
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
