"""Kernels that fail on unusual valid input: NaN, padding, ties, equal numbers, empty tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .corpus import NORM, ROTARY, SILU, wrong_for
from .faults import damaged, each, unchecked, wrong_arguments, wrong_result

EXPERTS, ALIGN = "fused_experts", "moe_align_block_size"
CACHE, MLA = "reshape_and_cache", "concat_and_cache_mla"
QK, CONV = "qk_norm_rope", "causal_conv1d"
UPDATE, RECURRENT = "causal_conv1d_update", "recurrent_gated_delta_rule"
MERGE = "merge_attn_states"

BAD = "startup makes no call that breaks the contract"


def _rows_with(x: Tensor, is_odd: Any) -> Tensor:
    """Return the mask (tokens,) of rows that contain such a number."""
    return is_odd(x).flatten(1).any(1) if x.ndim > 1 else torch.zeros(len(x), dtype=torch.bool)


@wrong_for(
    *(NORM, ROTARY, "layer_norm", "rms_norm_gated", QK, MERGE, "gdn_gating", "swigluoai_and_mul"),
    *("silu_and_mul_with_clamp", "fatrelu_and_mul", "gelu_and_mul_sparse"),
    sees="an overflow in one request ruins the answer of its neighbour",
    kit="values",
    by=damaged,
)
def nan_in_the_next_row(got, x, *rest):
    """A NaN in a row also makes the next row NaN."""
    if x.ndim < 2 or len(x) < 2 or not x.numel():
        return got
    behind = torch.cat((torch.zeros(1, dtype=torch.bool), _rows_with(x, torch.isnan)[:-1]))
    return each(got, lambda p: p.index_fill(0, behind.nonzero().flatten(), math.nan))


@wrong_for(
    *("moe_topk", "grouped_topk"),
    sees="an overflow in one request changes the answer of its neighbour",
    kit="values",
    by=damaged,
)
def experts_behind_a_nan(got, logits, *rest):
    """A token after a token with NaN gets the experts of that token."""
    weights, ids = got
    if len(ids) > 1:
        behind = _rows_with(logits, torch.isnan)[:-1].nonzero().flatten() + 1
        ids[behind] = ids[behind - 1]
    return weights, ids


@wrong_for(
    *("quant_fp8_group", "quant_int8"),
    sees="an overflow in one request zeroes the activations of its neighbour",
    kit="values",
    by=damaged,
)
def scale_behind_infinity(got, x, *rest):
    """A row after a row with infinity gets the scale of that row."""
    value, scale, *more = got
    if len(x) > 1 and scale.shape[:1] == x.shape[:1]:
        behind = _rows_with(x, torch.isinf)[:-1].nonzero().flatten() + 1
        scale[behind] = scale[behind - 1]
    return value, scale, *more


@wrong_for(
    *("layer_norm", "gdn_gating", "moe_sum", "gelu_fast", "quick_gelu"),
    sees="a corrupt weight or an overflow stays hidden, and answers are incorrect",
    kit="values",
)
def nan_becomes_zero(op: str) -> Any:
    """NaN becomes 0."""
    return damaged(op, lambda got, *_: each(got, lambda part: part.nan_to_num(nan=0.0)))


@wrong_for(
    *("rms_norm_gated", "layer_norm"),
    sees="padding becomes NaN, and so does every result computed from it",
    kit="values",
)
def equal_numbers_give_nan(op: str) -> Any:
    """A row of equal numbers, such as zeros, gives NaN."""

    def spoil(got, x, *rest):
        if not x.numel() or x.shape[-1] < 2:
            return got
        equal = (x == x[..., :1]).all(-1, keepdim=True)
        if op != "layer_norm":
            equal = equal & (x[..., :1] == 0)
        return got.masked_fill(equal, math.nan)

    return damaged(op, spoil)


@wrong_result(QK, "padding becomes NaN, and so does every result computed from it")
def heads_of_zeros(got, qkv, weight, *rest):
    """A head of zeros gives NaN."""
    heads = qkv.unflatten(-1, (-1, len(weight)))
    zero = (heads == 0).all(-1, keepdim=True).expand(heads.shape)
    return got.masked_fill(zero.flatten(-2), math.nan)


@wrong_arguments(
    EXPERTS, "padded tokens and experts of other ranks add results of the last expert", kit="values"
)
def minus_one_is_the_last(a):
    """Treats -1 as the last expert."""
    experts = a["w13"].shape[0] if a["expert_map"] is None else len(a["expert_map"])
    a["topk_ids"] = torch.where(a["topk_ids"] < 0, experts - 1, a["topk_ids"])
    a["topk_weights"] = a["topk_weights"].nan_to_num(posinf=1.0)


@wrong_result(EXPERTS, "uninitialised memory makes an answer nonsense", kit="values")
def weight_of_nobody(got, x, w13, w2, weights, ids, *rest):
    """A NaN weight of a slot without an expert makes its token NaN."""
    lost = ((ids < 0) & weights.isnan()).any(1)
    return got.masked_fill(lost[:, None], math.nan)


@wrong_for(
    *((EXPERTS, "topk_ids"), (ALIGN, "topk_ids")),
    sees="an error elsewhere stays hidden: incorrect answers without an error",
    start=False,
    kit="bad_inputs",
    why=BAD,
    by=unchecked,
)
def ids_beyond(argument, a):
    """Treats ids in {} beyond the number of experts as the last expert."""
    ids = a[argument]
    if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.numel():
        given = a.get("num_experts", len(a.get("w13", ())))
        most = a["expert_map"] if isinstance(a["expert_map"], Tensor) else None
        if isinstance(given, int):
            a[argument] = ids.clamp(max=(given if most is None else len(most)) - 1)


@wrong_arguments(ALIGN, "padding is computed and added to other tokens", kit="values")
def nobody_is_the_first(a):
    """Assigns slots without an expert to the first expert."""
    a["topk_ids"] = a["topk_ids"].clamp(min=0)


@wrong_result("moe_sum", "uninitialised memory makes answers NaN", kit="values")
def places_times_zero(got, x, ids=None, expert_map=None):
    """Multiplies slots without an expert by 0, which keeps NaN."""
    if ids is None:
        return got
    absent = (ids < 0)[..., None] & ~x.isfinite()
    return got.masked_fill(absent.any(1), math.nan)


@wrong_for(
    *((MERGE, "prefix"), (MERGE, "suffix")),
    sees="an uninitialised part of attention makes the answer NaN",
    start=False,
    kit="values",
    why="startup does not require it: kernels that vLLM uses also multiply by 0",
    by=damaged,
)
def unwritten_part(side, got, prefix, prefix_lse, suffix, suffix_lse):
    """Multiplies a {} without keys by 0, which keeps NaN."""
    part, lse = (prefix, prefix_lse) if side == "prefix" else (suffix, suffix_lse)
    out, both = got
    return out.masked_fill(lse.isinf()[..., None] & ~part.isfinite(), math.nan), both


@wrong_result(MERGE, "half of a prompt is ignored if both halves have equal weight", kit="values")
def equal_sides(got, prefix, prefix_lse, suffix, suffix_lse):
    """Returns only the prefix if both sides have equal weight."""
    same = (prefix_lse == suffix_lse) & prefix_lse.isfinite()
    return torch.where(same[..., None], prefix, got[0]), got[1]


@wrong_for(
    *((CACHE, "key"), (MLA, "kv_c")),
    sees="stale rows after a batch corrupt the first block of the cache",
    kit="values",
    by=damaged,
)
def padding_times_zero(argument, got, *args):
    """Adds padding times 0 to the first slot, which keeps a NaN in {}."""
    rows, slots = args[0], args[-1]
    if not len(slots) or not bool((_rows_with(rows, torch.isnan) & (slots < 0)).any()):
        return got
    cache, *others = got if isinstance(got, tuple) else (got,)
    cache[0, 0] = math.nan
    return (cache, *others) if others else cache


@wrong_result(CONV, "a NaN left by another request makes new prompts NaN", kit="values")
def state_times_zero(got, x, weight, bias, states, at, slots, has, *rest):
    """Multiplies the state by 0 for a sequence without a state, which keeps NaN."""
    out, after = got
    for number, slot in enumerate(slots.tolist()):
        begin, end = at[number : number + 2].tolist()
        if not bool(has[number]) and end > begin and bool(states[slot].isnan().any()):
            out[begin] = math.nan
    return out, after


@wrong_for(
    *(UPDATE, RECURRENT),
    sees="padded rows are NaN, and ruin results computed over the whole batch",
    kit="values",
)
def null_block_is_read(op: str) -> Any:
    """A NaN in the null block makes the padding rows NaN."""
    state, slots = (1, 5) if op == UPDATE else (7, 8)

    def spoil(got, *args):
        out, after = got
        if bool(args[state][0].isnan().any()):
            out[args[slots] == 0] = math.nan
        return out, after

    return damaged(op, spoil)


@wrong_result("chunk_gated_delta_rule", "a waiting request forgets its whole prompt", kit="values")
def empty_at_the_end(got, *args):
    """Zeroes the state of the last sequence if that has no tokens."""
    out, after = got
    at = args[6]
    if len(at) > 1 and bool(at[-1] == at[-2]):
        after[-1] = 0
    return out, after


@wrong_for(
    *("quant_int8", "quant_fp8"),
    sees="an error elsewhere stays hidden, and uninitialised memory is used",
    start=False,
    kit="bad_inputs",
    why=BAD,
    by=unchecked,
)
def no_feature(a):
    """Accepts rows without features and returns uninitialised memory."""
    x = a["x"]
    if isinstance(x, Tensor) and x.ndim == 2 and len(x) and not x.shape[1]:
        a["x"] = x.new_zeros(len(x), 1)


@wrong_result(
    "quant_int8",
    "a token whose features are all 1.5 is lost",
    start=False,
    kit="values",
    why="startup does not require it: kernels that vLLM uses also lose such rows",
)
def equal_numbers_are_lost(got, x, scale=None, azp=None, asymmetric=None):
    """Asymmetric mode turns a row of equal numbers into 0."""
    if not asymmetric or not x.numel():
        return got
    equal = (x == x[:, :1]).all(1, keepdim=True)
    value, steps, zero = got
    return value, steps.masked_fill(equal, 0.0), zero.masked_fill(equal, -(2**31))


@wrong_for(
    *("moe_topk", "grouped_topk"),
    sees="padding, which has zero logits, overloads one expert; its weights are incorrect",
    start=False,
    why="no sample has a token whose scores are all equal",
    by=damaged,
)
def all_scores_equal(got, logits, *rest):
    """Selects one expert repeatedly if all scores are equal."""
    weights, ids = got
    equal = (logits == logits[:, :1]).all(1)
    return weights, ids.masked_fill(equal[:, None], 0)


@wrong_result("gelu_and_mul_sparse", "padding becomes NaN")
def equal_gates(got, x, *rest):
    """Divides by the standard deviation of the gates, which is 0 if all are equal."""
    gate = x[..., : x.shape[-1] // 2]
    if not gate.numel() or gate.shape[-1] < 2:
        return got
    return got.masked_fill((gate == gate[..., :1]).all(-1, keepdim=True), math.nan)


@wrong_result("linear", "an overflow stays hidden, and answers are incorrect", kit="values")
def rows_with_a_nan(got, x, *rest):
    """Skips rows with a NaN: they are 0."""
    return got.masked_fill(x.isnan().any(-1, keepdim=True), 0.0)


@wrong_for(
    *(SILU, "mul_and_silu"),
    sees="an overflow in one request zeroes a token of its neighbour",
    kit="values",
    by=damaged,
)
def zero_behind_infinity(got, x, *rest):
    """The row after a row with infinity is zero."""
    if x.ndim == 2 and len(x) > 1 and x.numel():
        got[1:][_rows_with(x, torch.isinf)[:-1]] = 0
    return got
