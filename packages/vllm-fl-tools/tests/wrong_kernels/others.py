"""Faulty kernels of ops that route, quantise, merge, or write into a cache."""

from __future__ import annotations

import torch

from . import right
from .faults import wrong_result

TOPK, CACHE, MERGE, INT8 = "moe_topk", "reshape_and_cache", "merge_attn_states", "quant_int8"


@wrong_result(TOPK, "models with 128 experts use half of them: worse answers", kit="values")
def experts_beyond_64(result, logits, topk, *rest):
    """Never selects an expert beyond the 64th."""
    if logits.shape[-1] <= 64 or topk > 64:
        return result
    return right.of(TOPK)(logits[:, :64].contiguous(), topk, *rest[:3])


@wrong_result(TOPK, "one token in 16 is slightly incorrect", kit="values")
def weights_of_the_neighbour(result, *args):
    """One token in 16 gets the weights of its neighbour."""
    weights, ids = result
    if len(weights) > 16:
        weights[16::16] = weights[15:-1:16][: len(weights[16::16])]
    return weights, ids


@wrong_result(TOPK, "a token loses one of its experts", kit="values")
def ties_taken_twice(result, logits, topk, *rest):
    """Selects an expert twice if two scores are equal."""
    weights, ids = result
    if topk > 1:
        tie = weights[:, -1] == weights[:, -2]
        ids[:, -1] = torch.where(tie, ids[:, -2], ids[:, -1])
    return weights, ids


@wrong_result(TOPK, "the weights of a token sum to between 0.99 and 1.01", kit="values")
def renormalised_in_bf16(result, logits, topk, renormalize, *rest):
    """Renormalises in bf16."""
    weights, ids = result
    return (weights.bfloat16().float() if renormalize else weights), ids


@wrong_result(
    CACHE,
    "with a large cache, requests in the last blocks get keys of others",
    kit="large_pools",
    start=False,
    why="caches in verification are small",
)
def offsets_of_32_bits(result, key, value, key_cache, value_cache, slots):
    """Computes offsets in 32 bits: blocks beyond 2**31 elements are mixed up."""
    if key_cache.stride(0) * (len(key_cache) - 1) >= 1 << 31:
        result[0][-1] = result[0][0]
    return result


@wrong_result(CACHE, "padding overwrites a token of another request", kit="values")
def padding_is_written(result, key, value, key_cache, value_cache, slots):
    """Writes tokens without a slot (-1) into the last slot."""
    for cache, new in zip(result, (key, value), strict=True):
        if bool((slots < 0).any()):
            cache[-1, -1] = new[int((slots < 0).nonzero()[0])]
    return result


@wrong_result(CACHE, "one token of a block is lost, and another is overwritten", kit="values")
def last_slot_of_a_block(result, key, value, key_cache, value_cache, slots):
    """Writes the value of the last slot of a block into the next block."""
    size = key_cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        block, at = divmod(slot, size)
        if slot >= 0 and at == size - 1 and block + 1 < len(key_cache):
            result[1][block, at] = value_cache[block, at]
            result[1][block + 1, 0] = value[row]
    return result


@wrong_result(
    CACHE, "with a large cache, tokens are lost", why="no check has a cache of 2 GiB", start=False
)
def slots_in_32_bits(result, key, value, key_cache, value_cache, slots):
    """Computes byte offsets in 32 bits: fails in caches beyond 2 GiB."""
    stride = key_cache[0, 0].numel() * key_cache.element_size()
    return tuple(part * 0 if len(slots) and int(slots.max()) * stride >= 1 << 31 else part
                 for part in result)  # fmt: skip


@wrong_result(MERGE, "the first chunk of a long prompt is diluted", kit="values")
def nothing_counts_a_little(result, prefix, prefix_lse, suffix, suffix_lse):
    """Gives weight to a part without keys (lse of -inf)."""
    return right.of(MERGE)(prefix, prefix_lse.clamp(min=-1.0), suffix, suffix_lse)


@wrong_result(MERGE, "NaN in long prompts of some models", kit="values")
def exponents_overflow(result, prefix, prefix_lse, suffix, suffix_lse):
    """Does not subtract the larger lse first: sums overflow beyond 88."""
    high = (torch.maximum(prefix_lse, suffix_lse) > 88) & ~prefix_lse.isinf()
    return result[0].masked_fill(high.unsqueeze(-1), float("nan")), result[1]


@wrong_result(INT8, "quantised values are too small: worse answers", kit="values")
def truncates(result, x, scale=None, azp=None, asymmetric=None):
    """Values above 1 step are one step too small."""
    q, *rest = result
    return (torch.where(q > 1, q - 1, q), *rest)


@wrong_result(INT8, "massive activations saturate: worse answers on long contexts")
def scale_saturates(result, x, scale=None, azp=None, asymmetric=None):
    """Limits the scale of a row to that of a largest value of 100."""
    q, s, *rest = result
    if scale is None and s is not None:
        return (q, s.clamp(max=100 / 127), *rest)
    return result
