"""Merging of attention results for two sets of keys, equal to the PyTorch code in vLLM."""

from __future__ import annotations

import math

import torch

from . import implementations

__all__ = ["OPS", "merge_attn_states"]


def merge_attn_states(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Average both outputs with weights exp(lse), in fp32, rounded once.

    If neither side had keys, the result is (0, -inf).
    """
    prefix_lse = prefix_lse.masked_fill(prefix_lse == math.inf, -math.inf)
    suffix_lse = suffix_lse.masked_fill(suffix_lse == math.inf, -math.inf)
    most = torch.maximum(prefix_lse, suffix_lse)
    no_keys = most == -math.inf
    prefix, suffix = torch.exp(prefix_lse - most), torch.exp(suffix_lse - most)
    total = prefix + suffix
    # The output of a side without keys may be NaN, and NaN times a weight of 0 is NaN.
    prefix_part = prefix_output.float() * (prefix / total)[..., None]
    suffix_part = suffix_output.float() * (suffix / total)[..., None]
    output = prefix_part.masked_fill((prefix_lse == -math.inf)[..., None], 0.0)
    output = output + suffix_part.masked_fill((suffix_lse == -math.inf)[..., None], 0.0)
    output = output.masked_fill(no_keys[..., None], 0.0).to(prefix_output.dtype)
    lse = (torch.log(total) + most).masked_fill(no_keys, -math.inf)
    return output, lse


OPS = implementations(merge_attn_states)
