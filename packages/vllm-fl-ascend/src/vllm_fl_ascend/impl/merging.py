"""Merging of attention results for two sets of keys, on torch_npu's kernel."""

from __future__ import annotations

import math

import torch

from . import implementation

__all__ = ["OPS", "merge_attn_states"]

MULTIPLE, LARGEST = 8, 512
"""Limits of a head's number of features (CANN, aclnnAttentionUpdate)."""

NOTHING = -1e4
"""Replaces -inf, which the kernel may not support. Against a log-sum-exp of 0, its weight is 0."""


def merge_attn_states(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Average both outputs with weights exp(lse), with `npu_attention_update`.

    The larger log-sum-exp (natural logarithms) is subtracted first, for exact weights at large
    values.
    """
    if not prefix_output.numel():
        return prefix_output.new_empty(prefix_output.shape), prefix_lse.new_empty(prefix_lse.shape)
    prefix, suffix = (
        lse.masked_fill(lse == math.inf, -math.inf) for lse in (prefix_lse, suffix_lse)
    )
    most = torch.maximum(prefix, suffix)
    no_keys = most == -math.inf
    most = most.masked_fill(no_keys, 0.0)
    sums = [(lse - most).clamp(min=NOTHING).flatten() for lse in (prefix, suffix)]
    # The output of a side without keys may be uninitialised. The kernel would add it, times 0.
    outputs = [
        x.masked_fill((lse == -math.inf)[..., None], 0.0).flatten(0, 1).contiguous()
        for x, lse in ((prefix_output, prefix), (suffix_output, suffix))
    ]
    merged, lse = torch.ops.npu.npu_attention_update.default(sums, outputs, 1)
    output = merged.view(prefix_output.shape).masked_fill(no_keys[..., None], 0.0)
    return output, (lse.view(most.shape) + most).masked_fill(no_keys, -math.inf)


OPS = (
    implementation(
        merge_attn_states, f"head_size % {MULTIPLE} == 0 and {MULTIPLE} <= head_size <= {LARGEST}"
    ),
)
