"""Rotary position embedding, on torch_npu's kernel."""

from __future__ import annotations

import torch

from vllm_fl_ops.contracts.cos_sin import adjacent, joint_cos_sin

from . import implementation

__all__ = ["OPS", "TURNABLE", "rotary_embedding"]


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate the first 2 * cos.shape[-1] features of each head, by `npu_mrope`; out of place."""
    if not query.numel():
        return query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)
    # The kernel requires two tensors. Without a key, rotate one query head again and ignore it.
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


TURNABLE = (
    "cos.dtype == query.dtype and sin.dtype == query.dtype",
    # CANN's aclnnRopeWithSinCosCache requires heads and rotated parts in multiples of 64 bytes.
    "head_size * query.itemsize % 64 == 0 and 2 * half * query.itemsize % 64 == 0",
    adjacent,
)
"""Conditions for calls that `npu_mrope` supports."""

OPS = (implementation(rotary_embedding, *TURNABLE),)
