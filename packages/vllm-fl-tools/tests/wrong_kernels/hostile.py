"""Wrong for what is odd and legal: NaN, padding, ties, rows of equal numbers, nothing at all."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .corpus import MIXED, NORM, ROTARY, SILU, wrong_for, wrong_kernel
from .faults import changed, each, spoilt, unchecked

EXPERTS, ALIGN, CACHE, MLA, QK, CONV, UPDATE, RECURRENT, MERGE = (
    "fused_experts",
    "moe_align_block_size",
    "reshape_and_cache",
    "concat_and_cache_mla",
    "qk_norm_rope",
    "causal_conv1d",
    "causal_conv1d_update",
    "recurrent_gated_delta_rule",
    "merge_attn_states",
)

BAD = "start makes no call that breaks the contract"


def _rows_with(x: Tensor, is_odd: Any) -> Tensor:
    """(tokens,), which of them have such a number."""
    return is_odd(x).flatten(1).any(1) if x.ndim > 1 else torch.zeros(len(x), dtype=torch.bool)


@wrong_for(
    *(NORM, ROTARY, "layer_norm", "rms_norm_gated", QK, MERGE, "gdn_gating", "swigluoai_and_mul"),
    *("silu_and_mul_with_clamp", "fatrelu_and_mul", "gelu_and_mul_sparse"),
    fault="a NaN spoils the row behind it, too",
    sees="one request's overflow ends the answer of its neighbour",
    kit="values",
)
def nan_in_the_next_row(op: str) -> Any:
    def spoil(got, x, *rest):
        if x.ndim < 2 or len(x) < 2 or not x.numel():
            return got
        behind = torch.cat((torch.zeros(1, dtype=torch.bool), _rows_with(x, torch.isnan)[:-1]))
        return each(got, lambda p: p.index_fill(0, behind.nonzero().flatten(), math.nan))

    return spoilt(op, spoil)


@wrong_for(
    *("moe_topk", "grouped_topk"),
    fault="a token behind one with a NaN takes that one's experts",
    sees="one request's overflow changes the answer of its neighbour",
    kit="values",
)
def experts_behind_a_nan(op: str) -> Any:
    def spoil(got, logits, *rest):
        weights, ids = got
        if len(ids) > 1:
            behind = _rows_with(logits, torch.isnan)[:-1].nonzero().flatten() + 1
            ids[behind] = ids[behind - 1]
        return weights, ids

    return spoilt(op, spoil)


@wrong_for(
    *("quant_fp8_group", "quant_int8"),
    fault="a row behind one with infinity has that one's scale",
    sees="one request's overflow wipes out the numbers of its neighbour",
    kit="values",
)
def scale_behind_infinity(op: str) -> Any:
    def spoil(got, x, *rest):
        value, scale, *more = got
        if len(x) > 1 and scale.shape[:1] == x.shape[:1]:
            behind = _rows_with(x, torch.isinf)[:-1].nonzero().flatten() + 1
            scale[behind] = scale[behind - 1]
        return value, scale, *more

    return spoilt(op, spoil)


@wrong_for(
    *("layer_norm", "gdn_gating", "moe_sum", "gelu_fast", "quick_gelu"),
    fault="NaN becomes 0",
    sees="a broken weight, or an overflow, is answered as if nothing were wrong",
    kit="values",
)
def nan_becomes_zero(op: str) -> Any:
    return spoilt(op, lambda got, *_: each(got, lambda part: part.nan_to_num(nan=0.0)))


@wrong_for(
    *("rms_norm_gated", "layer_norm"),
    fault="equal numbers, zeros among them, give NaN",
    sees="padding turns into NaN, and with it all that it meets",
    kit="values",
)
def equal_numbers_give_nan(op: str) -> Any:
    def spoil(got, x, *rest):
        if not x.numel() or x.shape[-1] < 2:
            return got
        equal = (x == x[..., :1]).all(-1, keepdim=True)
        if op != "layer_norm":
            equal = equal & (x[..., :1] == 0)
        return got.masked_fill(equal, math.nan)

    return spoilt(op, spoil)


@wrong_kernel(
    QK,
    "heads of zeros give NaN",
    "padding turns into NaN, and with it all that it meets",
    sizes=MIXED,
    by=spoilt,
)
def heads_of_zeros(got, qkv, weight, *rest):
    heads = qkv.unflatten(-1, (-1, len(weight)))
    zero = (heads == 0).all(-1, keepdim=True).expand(heads.shape)
    return got.masked_fill(zero.flatten(-2), math.nan)


@wrong_kernel(
    EXPERTS,
    "-1 is the last expert",
    "padded tokens, and places of other ranks' experts, add what they should not",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def minus_one_is_the_last(a):
    experts = a["w13"].shape[0] if a["expert_map"] is None else len(a["expert_map"])
    a["topk_ids"] = torch.where(a["topk_ids"] < 0, experts - 1, a["topk_ids"])
    a["topk_weights"] = a["topk_weights"].nan_to_num(posinf=1.0)


@wrong_kernel(
    EXPERTS,
    "a weight of NaN in a place without an expert spoils its token",
    "what nobody wrote turns an answer into nonsense",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def weight_of_nobody(got, x, w13, w2, weights, ids, *rest):
    lost = ((ids < 0) & weights.isnan()).any(1)
    return got.masked_fill(lost[:, None], math.nan)


@wrong_for(
    *((EXPERTS, "topk_ids"), (ALIGN, "topk_ids")),
    fault="ids beyond the experts in {} are taken for the last one",
    sees="a fault elsewhere stays hidden: other answers, and no error",
    start=False,
    kit="bad_inputs",
    why=BAD,
)
def ids_beyond(op: str, argument: str) -> Any:
    def change(a):
        ids = a[argument]
        if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.numel():
            given = a.get("num_experts", len(a.get("w13", ())))
            most = a["expert_map"] if isinstance(a["expert_map"], Tensor) else None
            if isinstance(given, int):
                a[argument] = ids.clamp(max=(given if most is None else len(most)) - 1)

    return unchecked(op, change)


@wrong_kernel(
    ALIGN,
    "places without an expert are rows of the first",
    "padding is computed, and added to other tokens",
    kit="values",
    sizes=MIXED,
    by=changed,
)
def nobody_is_the_first(a):
    a["topk_ids"] = a["topk_ids"].clamp(min=0)


@wrong_kernel(
    "moe_sum",
    "places without an expert are multiplied by 0, which a NaN survives",
    "memory that nobody wrote turns answers into NaN",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def places_times_zero(got, x, ids=None, expert_map=None):
    if ids is None:
        return got
    absent = (ids < 0)[..., None] & ~x.isfinite()
    return got.masked_fill(absent.any(1), math.nan)


@wrong_for(
    *((MERGE, "prefix"), (MERGE, "suffix")),
    fault="a {} without keys is multiplied by 0, which a NaN survives",
    sees="a part of attention that nobody wrote turns the answer into NaN",
    start=False,
    kit="values",
    why="start does not ask for it: kernels that vLLM itself runs multiply by 0",
)
def unwritten_part(op: str, side: str) -> Any:
    def spoil(got, prefix, prefix_lse, suffix, suffix_lse):
        part, lse = (prefix, prefix_lse) if side == "prefix" else (suffix, suffix_lse)
        out, both = got
        return out.masked_fill(lse.isinf()[..., None] & ~part.isfinite(), math.nan), both

    return spoilt(op, spoil)


@wrong_kernel(
    MERGE,
    "where both sides weigh the same, it is the prefix alone",
    "halves of a prompt that count the same are one half",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def equal_sides(got, prefix, prefix_lse, suffix, suffix_lse):
    same = (prefix_lse == suffix_lse) & prefix_lse.isfinite()
    return torch.where(same[..., None], prefix, got[0]), got[1]


@wrong_for(
    *((CACHE, "key"), (MLA, "kv_c")),
    fault="padding is added to the first slot times 0: a NaN in {} stays there",
    sees="stale rows behind a batch spoil the first block of the cache",
    kit="values",
)
def padding_times_zero(op: str, argument: str) -> Any:
    def spoil(got, *args):
        rows, slots = args[0], args[-1]
        if not len(slots) or not bool((_rows_with(rows, torch.isnan) & (slots < 0)).any()):
            return got
        cache, *others = got if isinstance(got, tuple) else (got,)
        cache[0, 0] = math.nan
        return (cache, *others) if others else cache

    return spoilt(op, spoil)


@wrong_kernel(
    CONV,
    "the state of a sequence that has none is multiplied by 0",
    "what another request left, a NaN of its, turns new prompts into NaN",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def state_times_zero(got, x, weight, bias, states, at, slots, has, *rest):
    out, after = got
    for number, slot in enumerate(slots.tolist()):
        begin, end = at[number : number + 2].tolist()
        if not bool(has[number]) and end > begin and bool(states[slot].isnan().any()):
            out[begin] = math.nan
    return out, after


@wrong_for(
    *(UPDATE, RECURRENT),
    fault="a NaN in the null block gets into the rows of padding",
    sees="padded rows are NaN, and spoil what is computed over the whole batch",
    kit="values",
)
def null_block_is_read(op: str) -> Any:
    state, slots = (1, 5) if op == UPDATE else (7, 8)

    def spoil(got, *args):
        out, after = got
        if bool(args[state][0].isnan().any()):
            out[args[slots] == 0] = math.nan
        return out, after

    return spoilt(op, spoil)


@wrong_kernel(
    "chunk_gated_delta_rule",
    "the state of the last sequence is zero, if that has no token",
    "a request that waits forgets all of its prompt",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def empty_at_the_end(got, *args):
    out, after = got
    at = args[6]
    if len(at) > 1 and bool(at[-1] == at[-2]):
        after[-1] = 0
    return out, after


@wrong_for(
    *("quant_int8", "quant_fp8"),
    fault="rows without a feature give what nobody wrote, and no error",
    sees="a fault elsewhere ends in memory that nobody wrote",
    start=False,
    kit="bad_inputs",
    why=BAD,
)
def no_feature(op: str) -> Any:
    def change(a):
        x = a["x"]
        if isinstance(x, Tensor) and x.ndim == 2 and len(x) and not x.shape[1]:
            a["x"] = x.new_zeros(len(x), 1)

    return unchecked(op, change)


@wrong_kernel(
    "quant_int8",
    "asymmetric, a row of equal numbers is 0",
    "a channel that is 1.5 everywhere is lost",
    start=False,
    kit="values",
    why="start does not ask for it: kernels that vLLM itself runs lose them",
    sizes=MIXED,
    by=spoilt,
)
def equal_numbers_are_lost(got, x, scale=None, azp=None, asymmetric=None):
    if not asymmetric or not x.numel():
        return got
    equal = (x == x[:, :1]).all(1, keepdim=True)
    value, steps, zero = got
    return value, steps.masked_fill(equal, 0.0), zero.masked_fill(equal, -(2**31))


@wrong_for(
    *("moe_topk", "grouped_topk"),
    fault="where all scores are equal, one expert is taken again and again",
    sees="padding, whose logits are zeros, overloads one expert; its weights are wrong",
    start=False,
    why="no sample has a token whose scores are all equal",
)
def all_scores_equal(op: str) -> Any:
    def spoil(got, logits, *rest):
        weights, ids = got
        equal = (logits == logits[:, :1]).all(1)
        return weights, ids.masked_fill(equal[:, None], 0)

    return spoilt(op, spoil)


@wrong_kernel(
    "gelu_and_mul_sparse",
    "where all gates are equal it divides by their deviation, which is 0",
    "padding turns into NaN",
    sizes=MIXED,
    by=spoilt,
)
def equal_gates(got, x, *rest):
    gate = x[..., : x.shape[-1] // 2]
    if not gate.numel() or gate.shape[-1] < 2:
        return got
    return got.masked_fill((gate == gate[..., :1]).all(-1, keepdim=True), math.nan)


@wrong_kernel(
    "linear",
    "rows with a NaN are left out: they are 0",
    "an overflow is answered as if nothing were wrong",
    kit="values",
    sizes=MIXED,
    by=spoilt,
)
def rows_with_a_nan(got, x, *rest):
    return got.masked_fill(x.isnan().any(-1, keepdim=True), 0.0)


@wrong_for(
    *(SILU, "mul_and_silu"),
    fault="the row behind one with an infinity is zero",
    sees="one request's overflow wipes out its neighbour's token",
    kit="values",
)
def zero_behind_infinity(op: str) -> Any:
    def spoil(got, x, *rest):
        if x.ndim == 2 and len(x) > 1 and x.numel():
            got[1:][_rows_with(x, torch.isinf)[:-1]] = 0
        return got

    return spoilt(op, spoil)
