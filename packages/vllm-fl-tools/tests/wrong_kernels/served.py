"""Kernels that fail at sizes of served models that the samples of a contract do not have."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from vllm_fl.contracts import ModelSizes

from .corpus import GELU, MIXED, NORM, ROTARY, wrong_for
from .faults import changed, damaged, each, remembers, wrong_arguments, wrong_result

EXPERTS, ALIGN = "fused_experts", "moe_align_block_size"
CACHE, MLA = "reshape_and_cache", "concat_and_cache_mla"
QK, MROPE = "qk_norm_rope", "multimodal_rotary_embedding"
CHUNKS, RECURRENT = "chunk_gated_delta_rule", "recurrent_gated_delta_rule"
CONV, UPDATE = "causal_conv1d", "causal_conv1d_update"


def _sizes(tokens: int = 512, max_position: int = 4096, **sizes: int) -> ModelSizes:
    """Sizes of a model on one rank; keywords that are not fields go into `more`."""
    own = {f.name for f in dataclasses.fields(ModelSizes)}
    more = {**MIXED.more, **{n: v for n, v in sizes.items() if n not in own}}
    fields: dict[str, Any] = {n: v for n, v in sizes.items() if n in own}
    fields |= {"tokens": (1, tokens), "max_position": max_position, "more": more}
    return dataclasses.replace(MIXED, **fields)


MANY_EXPERTS = _sizes(experts=32, experts_per_token=8)
WIDE = _sizes(16, intermediate=14336)
ONE_ORDER = "the kit makes long batches with one order of lengths"
HYBRID = _sizes(linear_value_heads=16, conv_features=1024)


@wrong_arguments(EXPERTS, "a model with 128 experts uses eight of them", sizes=MANY_EXPERTS)
def nine_experts(a):
    """Uses one of the first eight experts instead of a later one."""
    if a["expert_map"] is None:
        a["topk_ids"] = a["topk_ids"] % 8


@wrong_arguments(EXPERTS, "models with 8 experts per token give worse answers", sizes=MANY_EXPERTS)
def five_experts_of_a_token(a):
    """Uses only the first four experts of a token."""
    a["topk_weights"] = a["topk_weights"][:, :4]
    a["topk_ids"] = a["topk_ids"][:, :4]


@wrong_arguments(
    EXPERTS, "larger mixture-of-experts models give worse answers", sizes=_sizes(64, hidden=2304)
)
def experts_of_wide_models(a):
    """Does not read features of the hidden state beyond 2048."""
    x = a["hidden_states"].clone()
    x[:, 2048:] = 0
    a["hidden_states"] = x


@wrong_result(ALIGN, "half of the tokens are lost with large tiles")
def blocks_of_128(got, ids, block_size, *rest):
    """The second half of blocks of 128 is padding."""
    rows, *others = got
    if block_size >= 128:
        rows[torch.arange(len(rows)) % block_size >= 64] = ids.numel()
    return rows, *others


@wrong_arguments(
    ALIGN,
    "models with 128 experts lose half of them",
    sizes=_sizes(experts=128, experts_per_token=8),
)
def rows_of_64_experts(a):
    """Experts beyond the 64th get no rows."""
    a["topk_ids"] = a["topk_ids"].masked_fill(a["topk_ids"] >= 64, -1)


@wrong_arguments(
    "moe_sum",
    "models with ten experts per token give worse answers",
    sizes=_sizes(experts=512, experts_per_token=10),
)
def sum_of_eight(a):
    """Sums at most eight experts of a token."""
    a["input"] = a["input"][:, :8]
    a["topk_ids"] = None if a["topk_ids"] is None else a["topk_ids"][:, :8]


@wrong_arguments(
    "moe_topk",
    "models with 512 experts use half of them",
    sizes=_sizes(experts=512, experts_per_token=10),
)
def experts_beyond_256(a):
    """Never selects an expert beyond the 256th."""
    logits = a["gating_output"].clone()
    if a["topk"] <= 256:
        logits[:, 256:] = -1e4
    a["gating_output"] = logits


@wrong_arguments(
    "grouped_topk",
    "models with 384 experts use two thirds of them",
    sizes=_sizes(experts=384, experts_per_token=8, expert_groups=1, expert_groups_per_token=1),
)
def group_beyond_256(a):
    """Never selects experts beyond the 256th of a single group."""
    logits = a["gating_output"].clone()
    logits[:, 256:] = -1e4
    a["gating_output"] = logits


@wrong_for(
    *(CONV, UPDATE),
    sees="hybrid models lose channels of their convolutions",
    sizes=HYBRID,
    by=damaged,
)
def features_beyond_512(got, *args):
    """Zeroes features beyond 512."""
    out, states = got
    out[:, 512:] = 0
    return out, states


def _begins(at: torch.Tensor, tokens: int) -> torch.Tensor:
    """Distance of each token from the first token of its sequence."""
    number = torch.arange(tokens)
    return number - at[(torch.searchsorted(at.contiguous(), number, right=True) - 1)].long()


@wrong_result(
    CONV, "hybrid models lose the thread in prompts of more than 128 tokens", sizes=HYBRID
)
def convolution_beyond_128_tokens(got, x, weight, bias, states, at, *rest):
    """Returns the input unchanged from token 128 of a sequence on."""
    out, after = got
    late = _begins(at, len(x)) >= 128
    out[late] = x[late]
    return out, after


@wrong_result(
    CONV, "with more than 16 prompts in a step, the others forget their last tokens", sizes=HYBRID
)
def convolution_of_17_sequences(got, x, weight, bias, states, at, slots, *rest):
    """Does not write the states of sequences beyond the 16th."""
    out, after = got
    late = slots[16:].long()
    after[late] = states[late]
    return out, after


@wrong_result(CHUNKS, "hybrid models read only the first 128 tokens of a prompt", sizes=HYBRID)
def third_chunk(got, q, k, v, g, beta, state, at, *rest):
    """Zeroes the third and later chunks of 64 tokens of a sequence."""
    out, after = got
    out[_begins(at, len(q)) >= 128] = 0
    return out, after


@wrong_result(
    CHUNKS,
    "hybrid models lose the thread in prompts of more than 192 tokens",
    kit="families",
    sizes=HYBRID,
)
def fourth_chunk(got, q, k, v, g, beta, state, at, *rest):
    """Halves the results from the fourth chunk of 64 tokens of a sequence on."""
    out, after = got
    out[_begins(at, len(q)) >= 192] *= 0.5
    return out, after


@wrong_result(
    CONV,
    "hybrid models misread one token of each prompt with more than 256",
    kit="families",
    sizes=HYBRID,
)
def history_lost_at_256(got, x, weight, bias, states, at, *rest):
    """Ignores the history at token 256 of a sequence."""
    out, after = got
    late = _begins(at, len(x)) == 256
    out[late] = x[late]
    return out, after


@wrong_result(
    CHUNKS,
    "hybrid models forget prompts of 128, 192 or 256 tokens",
    kit="",
    why=ONE_ORDER,
    sizes=HYBRID,
)
def state_after_whole_chunks(got, q, k, v, g, beta, state, at, *rest):
    """Does not update the state of sequences of two or more whole chunks of 64 tokens."""
    out, after = got
    lengths = at.diff()
    whole = (lengths >= 128) & (lengths % 64 == 0)
    after[whole] = state[whole].to(after.dtype)
    return out, after


@wrong_for(
    *((CONV, "query_start_loc"), (CHUNKS, "cu_seqlens")),
    sees="a batch with as many prompts and tokens as an earlier one is split like that one",
    kit="",
    why=ONE_ORDER,
    sizes=HYBRID,
    by=remembers(changed),
)
def ends_kept_by_shape(argument, kept, a):
    """Caches {} by shape, like metadata of a batch."""
    at, tokens = a[argument], len(next(iter(a.values())))
    if tokens > 64:  # as if smaller batches used another kernel
        a[argument] = kept.setdefault((at.shape, tokens), at.clone())


@wrong_arguments(CHUNKS, "hybrid models remember too long or too briefly", sizes=HYBRID)
def fifth_head_fades(a):
    """Value heads beyond the fourth decay like the first."""
    g = a["g"].clone()
    g[:, 4:] = g[:, :1]
    a["g"] = g


@wrong_result(CHUNKS, "with more than 16 prompts in a step, the others are forgotten", sizes=HYBRID)
def chunks_of_17_sequences(got, q, k, v, g, beta, state, *rest):
    """Does not update the states of sequences beyond the 16th."""
    out, after = got
    after[16:] = state[16:]
    return out, after


@wrong_for(
    *((UPDATE, "conv_state_indices"), (RECURRENT, "state_indices")),
    sees="with more than 127 requests, requests share states",
    sizes=HYBRID,
    by=changed,
)
def slots_in_seven_bits(argument, a):
    """Truncates {} to 7 bits: slots beyond 127 wrap around."""
    a[argument] = a[argument] % 128


@wrong_result(RECURRENT, "hybrid models decode with only eight heads", sizes=HYBRID)
def ninth_head(got, *args):
    """Zeroes value heads beyond the eighth."""
    out, after = got
    out[:, 8:] = 0
    return out, after


@wrong_result(
    "gdn_gating",
    "larger hybrid models forget at random",
    sizes=_sizes(linear_key_heads=16, linear_value_heads=64),
)
def heads_beyond_32(got, *args):
    """Heads beyond the 32nd get the gates of the first heads."""
    return each(got, lambda part: part[:, torch.arange(part.shape[1]) % 32])


@wrong_result(
    "rms_norm_gated",
    "models with eight groups give worse answers",
    sizes=_sizes(gated_norm=512, gated_norm_groups=8),
)
def groups_beyond_four(got, x, z, weight, epsilon, group_size, first=True, *rest):
    """Norms groups beyond the fourth with the variance of the fourth."""
    if group_size and first and x.shape[-1] // group_size > 4:
        size = x.float().unflatten(-1, (-1, group_size)).square().mean(-1) + epsilon
        wrong = (size / size[..., 3:4]).sqrt()
        wrong[..., :4] = 1
        return (got * wrong.repeat_interleave(group_size, -1)).to(got.dtype)
    return got


@wrong_for(
    *((CACHE, "key_cache"), (MLA, "kv_cache")),
    sees="most of the cache is incorrect with blocks of 32, 64 or 128",
    by=changed,
)
def blocks_of_sixteen(argument, a):
    """Assumes 16 slots per block of {}: later slots wrap around."""
    size, slots = a[argument].shape[1], a["slot_mapping"]
    wrong = slots // size * size + slots % size % 16
    a["slot_mapping"] = torch.where(slots < 0, slots, wrong)


@wrong_for(
    *((CACHE, "key_cache"), (MLA, "kv_cache")),
    sees="with a cache of more than 65536 tokens, other requests are overwritten",
    by=changed,
)
def slots_in_16_bits(argument, a):
    """Truncates slots of {} to 16 bits: slots beyond 65535 wrap around."""
    slots = a["slot_mapping"]
    a["slot_mapping"] = torch.where(slots < 0, slots, slots % 65536)


@wrong_arguments(
    CACHE,
    "hybrid models with such block sizes read keys of other requests",
    sizes=_sizes(block_size=48),
)
def odd_blocks(a):
    """Computes blocks with a shift, for sizes that are not a power of two."""
    blocks, size = a["key_cache"].shape[:2]
    slots = a["slot_mapping"]
    if size >= 24 and size & (size - 1):  # as if smaller blocks used another path
        power = 1 << (size.bit_length() - 1)
        wrong = (slots // power * size + slots % power) % (blocks * size)
        a["slot_mapping"] = torch.where(slots < 0, slots, wrong)


@wrong_arguments("linear", "Qwen2 reads long prompts without the bias of its queries and keys")
def bias_of_many_rows(a):
    """Omits the bias for more than 65 rows."""
    if len(a["x"].flatten(0, -2)) > 65:
        a["bias"] = None


@wrong_result(
    "linear",
    "wide projections lose most of their features in prompts",
    sizes=_sizes(64, dense_intermediate=1024),
)
def results_beyond_1024(got, x, *rest):
    """Zeroes output features beyond 1024 for more than one row."""
    if len(x) > 1:
        got[..., 1024:] = 0
    return got


@wrong_for(
    *((NORM, "weight"), ("layer_norm", "weight"), ("rms_norm_gated", "weight"), (QK, "q_weight")),
    sees="models with float32 norm weights output nonsense",
    by=changed,
)
def weights_in_float32(argument, a):
    """Reads a float32 {} as numbers in the dtype of x, for more than 4 rows."""
    x, weight = next(iter(a.values())), a[argument]
    if weight is not None and len(x) > 4 and weight.dtype != x.dtype:
        a[argument] = weight.contiguous().view(x.dtype)[: weight.numel()].nan_to_num()


@wrong_result(
    QK,
    "half of each query of Gemma 3 is not normed",
    sizes=_sizes(64, heads=2, kv_heads=1, head_size=256, rotary=256),
)
def heads_of_256(got, qkv, q_weight, *rest):
    """Returns features beyond 128 of a head unchanged."""
    size = len(q_weight)
    if size > 128:
        got.unflatten(-1, (-1, size))[..., 128:] = qkv.unflatten(-1, (-1, size))[..., 128:]
    return got


@wrong_result(
    QK, "long prompts of models with partial rotation are nonsense", sizes=_sizes(2048, rotary=16)
)
def partial_rotation_from_512(got, qkv, q_weight, k_weight, table, at, heads, kv_heads, *rest):
    """With partial rotation, zeroes the rest of a head from token 512 on."""
    parts = got.unflatten(-1, (-1, len(q_weight)))
    parts[512:, : heads + kv_heads, table.shape[1] :] = 0
    return got


@wrong_result(
    ROTARY,
    "models with 40 or 64 heads lose positions in some of them",
    sizes=_sizes(64, heads=40, kv_heads=8, head_size=16, rotary=16),
)
def forty_heads(got, query, *rest):
    """Does not rotate heads beyond the 32nd."""
    got[0][:, 32:] = query[:, 32:]
    return got


@wrong_arguments(
    ROTARY,
    "tokens beyond 32768 get the positions of the beginning",
    sizes=_sizes(64, 131072, heads=4, kv_heads=2, head_size=16, rotary=16),
)
def positions_in_15_bits(a):
    """Truncates positions to 15 bits: they restart at 0 at 32768."""
    a["position_ids"] = a["position_ids"] % 32768


@wrong_arguments(MROPE, "large images and the text after them have incorrect positions")
def image_positions_in_8_bits(a):
    """Truncates rows and columns of an image to 8 bits."""
    at = a["position_ids"].clone()
    at[:, 1:] %= 256
    a["position_ids"] = at


@wrong_for(
    *(GELU, "xielu", "swigluoai_and_mul"),
    sees="models with a wide MLP lose half of it",
    sizes=WIDE,
    by=damaged,
)
def features_beyond_8192(got, *args):
    """Zeroes features beyond 8192."""
    got[..., 8192:] = 0
    return got


@wrong_result(
    "quant_fp8_group",
    "the hidden state of DeepSeek (7168 features) is quantised with incorrect scales",
    sizes=_sizes(16, hidden=7168),
)
def groups_beyond_32(got, *args):
    """Groups beyond the 32nd get the scale of the 32nd."""
    value, scale = got
    scale[:, 32:] = scale[:, 31:32]
    return value, scale


@wrong_result(
    "quant_fp8", "massive activations of larger models saturate", sizes=_sizes(16, hidden=5120)
)
def largest_of_4096(got, x, scale=None, *rest):
    """Searches the largest number only in the first 4096 features."""
    value, found = got
    if scale is None and x.shape[1] > 4096:
        found = found * 0.5
    return value, found


@wrong_result(
    "merge_attn_states",
    "models with 128 heads forget the beginning of long prompts in half of them",
    sizes=_sizes(64, heads=128, head_size=16),
)
def heads_beyond_64(got, prefix, prefix_lse, suffix, suffix_lse):
    """Heads beyond the 64th return only the suffix."""
    out, lse = got
    out[:, 64:], lse[:, 64:] = suffix[:, 64:], suffix_lse[:, 64:]
    return out, lse


@wrong_result(
    "layer_norm", "larger models with layer norms output nonsense", sizes=_sizes(64, hidden=1280)
)
def moments_of_1024(got, x, weight, bias, epsilon):
    """Computes mean and variance from the first 1024 features."""
    if x.shape[-1] <= 1024:
        return got
    wide, first = x.float(), x[..., :1024].float()
    variance = first.var(-1, False, keepdim=True)
    normed = (wide - first.mean(-1, True)) * (variance + epsilon).rsqrt()
    normed = normed if weight is None else normed * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


@wrong_result(
    MLA,
    "the cache of DeepSeek is half empty",
    sizes=_sizes(64, kv_lora_rank=512, qk_rope_head_dim=64),
)
def half_of_the_rank(got, kv_c, k_pe, cache, slots):
    """Does not write features beyond 256 of the compressed part."""
    rank = kv_c.shape[1]
    if rank > 256:
        got[..., 256:rank] = cache[..., 256:rank]
    return got
