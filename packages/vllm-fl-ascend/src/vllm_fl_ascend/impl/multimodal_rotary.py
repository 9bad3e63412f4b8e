"""Rotary position embedding with three positions per token, on torch_npu's kernel."""

from __future__ import annotations

import torch

from vllm_fl_ops.contracts.cos_sin import joint_cos_sin

from . import implementation
from .rotary import TURNABLE

__all__ = ["OPS", "multimodal_rotary_embedding"]


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
    """Rotate the first 2 * cos.shape[-1] features of each head, by `npu_mrope`; out of place.

    Not supported: interleaved axes, which older releases of CANN lack; see also `TURNABLE`.
    """
    if not query.numel():
        return query.new_empty(query.shape), key.new_empty(key.shape)
    turned, other = torch.ops.npu.npu_mrope.default(
        position_ids.t().long().contiguous(),
        query.flatten(1),
        key.flatten(1),
        joint_cos_sin(cos, sin),
        query.shape[-1],
        mrope_section=list(mrope_section),
        rotary_mode="interleave" if rotary_interleaved else "half",
    )
    return turned.view(query.shape), other.view(key.shape)


OPS = (
    implementation(
        multimodal_rotary_embedding,
        "not mrope_interleaved",
        # Without pairs for the first axis CANN uses one position only (aclnnRopeWithSinCosCache).
        "min(mrope_section) >= 1",
        *TURNABLE,
    ),
)
