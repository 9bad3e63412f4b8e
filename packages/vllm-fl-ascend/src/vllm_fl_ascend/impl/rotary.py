"""Rotary position embedding, on torch_npu's kernel."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl
from vllm_fl_ops.contracts.cos_sin import joint_cos_sin

from ..npu import available
from . import VENDOR, elsewhere, mixed, unsuitable

__all__ = ["OPS", "rotary_embedding", "supports_rotary_embedding", "unturnable"]

MULTIPLE = 64
"""Bytes of which a head and its rotating part are a multiple (CANN's aclnnRopeWithSinCosCache)."""


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn the first 2 * cos.shape[-1] features of each head, by `npu_mrope`; out of place.

    Args:
        query: (tokens, heads, head_size), float32, float16 or bfloat16, of any layout.
        key: (tokens, kv_heads, head_size), of query's dtype, or None.
        cos, sin: (max_position, half), of query's dtype, adjacent halves of one cache, which
            `supports` sees to.
        position_ids: (tokens,), int64 or int32, in [0, max_position).
        rotary_interleaved: pairs are (2 * i, 2 * i + 1) instead of (i, i + half).

    Returns:
        (query, key) turned; None for a key of None.

    Raises:
        RuntimeError: CANN's kernel fails.
    """
    if not query.numel():
        return query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)
    # The kernel turns two tensors. Without a key the second is one head, whose result is dropped.
    second = query[:, :1] if key is None else key
    turned, other = torch.ops.npu.npu_mrope.default(
        position_ids.long(),
        query.flatten(1),
        second.flatten(1),
        joint_cos_sin(cos, sin),
        query.shape[-1],
        rotary_mode="interleave" if rotary_interleaved else "half",
    )
    return turned.view(query.shape), None if key is None else other.view(key.shape)


def supports_rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> Availability:
    """True, or why the kernel would fail."""
    if position_ids.shape != query.shape[:1] or position_ids.is_floating_point():
        return f"position_ids is {position_ids.dtype} {tuple(position_ids.shape)}"
    return unturnable(query, key, cos, sin, position_ids) or True


def unturnable(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
) -> str | None:
    """Why the kernel would fail, or take other heads; None if it does neither.

    The shape of position_ids is left to the caller.
    """
    reason = (
        unsuitable("query", query)
        or mixed("key", key, "query", query)
        or mixed("cos", cos, "query", query)
        or mixed("sin", sin, "query", query)
        or elsewhere("position_ids", position_ids, query)
    )
    if reason:
        return reason
    tokens, _heads, head_size = query.shape
    if key is not None and key.shape != (tokens, key.shape[1], head_size):  # it would be cut anew
        return f"key is {tuple(key.shape)} and query {tuple(query.shape)}"
    step = MULTIPLE // query.itemsize
    for what, features in (("head_size", head_size), ("rotary size", 2 * cos.shape[-1])):
        if features % step or features > head_size:
            return f"the {what} {features} is no multiple of {step} up to {head_size}"
    joint = joint_cos_sin(cos, sin) is not None
    return None if joint else "cos and sin are not the two halves of one cache"


OPS = (
    OpImpl(
        "rotary_embedding",
        *VENDOR,
        rotary_embedding,
        "ascend",
        available=available,
        supports=supports_rotary_embedding,
    ),
)
