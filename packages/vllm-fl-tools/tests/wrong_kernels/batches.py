"""Kernels that fail in batches of real engines: long, with runs or repeats, or one row shorter."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .corpus import MIXED, NORM, ROTARY, SILU, wrong_for
from .faults import (
    changed,
    damaged,
    each,
    taken,
    with_arguments,
    wrong_arguments,
    wrong_result,
    wrong_result_later,
)

CACHE, MLA = "reshape_and_cache", "concat_and_cache_mla"
QK, MROPE = "qk_norm_rope", "multimodal_rotary_embedding"

LONG = dataclasses.replace(MIXED, tokens=(1, 8192))


def _wraps(op: str, period: int) -> Any:
    return damaged(op, lambda got, x, *_: taken(got, torch.arange(len(x)) % period))


@wrong_for(
    *(SILU, NORM, ROTARY, "linear", QK, "moe_topk", "moe_sum"),
    sees="the end of a long prompt is read as its beginning",
)
def wraps_at_512(op: str) -> Any:
    """The grid wraps at 512 tokens: later rows repeat the first ones."""
    return _wraps(op, 512)


@wrong_for(
    *("layer_norm", "rms_norm_gated", "merge_attn_states", "quant_fp8_group", "gelu_new", MROPE),
    sees="the end of a long prompt is read as its beginning",
)
def wraps_at_1024(op: str) -> Any:
    """The grid wraps at 1024 tokens: later rows repeat the first ones."""
    return _wraps(op, 1024)


@wrong_for(
    *("mul_and_silu", "xielu", "quant_int8"),
    sees="the end of the largest prefills is read as their beginning",
    sizes=LONG,
)
def wraps_at_4096(op: str) -> Any:
    """The grid wraps at 4096 tokens: later rows repeat the first ones."""
    return _wraps(op, 4096)


@wrong_for(
    *("fused_experts", "gdn_gating", "swigluoai_and_mul", "grouped_topk"),
    sees="512 tokens of each long prompt have the results of other tokens",
    by=damaged,
)
def tiles_change_places(got, x, *rest):
    """Swaps the second and third tile of 256 tokens from 1024 tokens on."""
    order = torch.arange(len(x))
    if len(x) >= 1024:
        order[256:768] = order[256:768].roll(256)
    return taken(got, order)


@wrong_for(
    *("linear", NORM, "layer_norm", "rms_norm_gated", QK, ROTARY, "quant_int8"),
    sees="infinity if a long prompt has an activation beyond 65504",
    by=changed,
)
def large_tiles_through_fp16(arguments):
    """Uses large tiles in fp16 beyond 256 tokens."""
    name, x = next(iter(arguments.items()))
    if len(x) > 256:
        arguments[name] = x.half().to(x.dtype)


@wrong_arguments(CACHE, "attention uses the values of other tokens in long prompts")
def values_wrap_at_512(a):
    """From token 512 on, writes the values of the token 512 positions earlier."""
    a["value"] = a["value"][torch.arange(len(a["value"])) % 512]


@wrong_arguments(MLA, "positions repeat in long prompts")
def rotated_part_wraps_at_1024(a):
    """From token 1024 on, writes the rotated part of the token 1024 positions earlier."""
    a["k_pe"] = a["k_pe"][torch.arange(len(a["k_pe"])) % 1024]


@wrong_result("moe_align_block_size", "experts get the rows of other tokens in long prompts")
def rows_in_ten_bits(got, ids, *rest):
    """Numbers tokens in 10 bits: tokens from 1024 on wrap around to the first rows."""
    rows, *others = got
    real = rows < ids.numel()
    return torch.where(real, rows % (1024 * ids.shape[1]), rows), *others


def _runs(positions: Tensor, most: int) -> Tensor:
    """Consecutive positions from the first one, at most `most` - 1."""
    steps = torch.arange(len(positions), device=positions.device)
    return (positions[0] + steps).clamp(max=most - 1).to(positions.dtype)


def _is_run(positions: Tensor) -> bool:
    return len(positions) > 1 and bool(positions[1] == positions[0] + 1)


@wrong_arguments(
    ROTARY, "the second of two prompts in a step is rotated as if it continued the first"
)
def one_run_of_positions(a):
    """Treats all positions as consecutive if the second is the first + 1."""
    if _is_run(a["position_ids"]):
        a["position_ids"] = _runs(a["position_ids"], len(a["cos"]))


@wrong_arguments(
    ROTARY, "the second of two prompts in a step is rotated as if it continued the first"
)
def two_prompts_are_one(a):
    """Keeps counting when positions restart at 0: two prompts become one."""
    at = a["position_ids"]
    begins = (at[1:] == 0).nonzero().flatten() + 1
    if _is_run(at) and len(begins):
        first = int(begins[0])
        a["position_ids"] = torch.cat((at[:first], at[first:] + at[first - 1] + 1)).clamp(
            max=len(a["cos"]) - 1
        )


@wrong_arguments(QK, "up to 14 tokens after the end of a prompt are rotated incorrectly")
def runs_of_sixteen(a):
    """Treats 16 tokens as consecutive if their first two positions are."""
    blocks = [
        _runs(block, len(a["cos_sin_cache"])) if _is_run(block) else block
        for block in a["position_ids"].split(16)
    ]
    a["position_ids"] = torch.cat(blocks)


@wrong_for(
    *(QK, ROTARY),
    sees="if two requests decode at equal positions, others are rotated by that position",
    by=changed,
)
def decoding_in_step(a):
    """Uses the first position for all, from 3 tokens on, if the second equals it."""
    at = a["position_ids"]
    if len(at) > 2 and bool(at[0] == at[1]):
        a["position_ids"] = at[:1].expand(len(at)).clone()


@wrong_arguments(MROPE, "images after text lose their rows and columns")
def text_before_an_image(a):
    """Uses the time axis for all three axes if they are equal in the first row."""
    at = a["position_ids"]
    if len(at) and bool((at[0] == at[0, 0]).all()):
        a["position_ids"] = at[:, :1].expand(len(at), 3).clone()


@wrong_for(
    *(NORM, SILU, "linear", "layer_norm", "quant_int8", "moe_topk", "quick_gelu", "gdn_gating"),
    sees="all but the first of repeated tokens are lost",
    by=damaged,
)
def equal_neighbours(got, x, *rest):
    """Skips a row that equals the previous row."""
    if len(x) < 2 or x.ndim < 2 or not x.numel():
        return got
    same = torch.cat((torch.zeros(1, dtype=torch.bool), (x[1:] == x[:-1]).flatten(1).all(1)))

    def without(part: Tensor) -> Tensor:
        if part.shape[:1] == x.shape[:1]:
            part[same] = torch.zeros((), dtype=part.dtype)
        return part

    return each(got, without) if bool(same.any()) else got


@wrong_result(
    "fused_experts",
    "in a batch of repeated tokens, results from the 17th on are zero",
    kit="",
    why="the kit's model has no experts; for public models it tries few tokens",
)
def all_to_the_same_experts(got, x, w13, w2, weights, ids, *rest):
    """Computes only 16 tokens if all tokens have the same experts."""
    if len(ids) > 16 and bool((ids == ids[0]).all()):
        got[16:] = 0
    return got


@wrong_arguments(CACHE, "keys of the second prompt in a step overwrite keys of other requests")
def one_run_of_slots(a):
    """Treats all slots as consecutive if the second is the first + 1."""
    slots, room = a["slot_mapping"], a["key_cache"].shape[0] * a["key_cache"].shape[1]
    if _is_run(slots) and slots[0] >= 0 and len(slots) <= room:
        a["slot_mapping"] = (slots[0] + torch.arange(len(slots))).to(slots.dtype) % room


@wrong_arguments(MLA, "two prompts with such blocks are mixed up")
def slots_by_first_and_last(a):
    """Copies all tokens as one block if last slot - first slot = tokens - 1."""
    slots = a["slot_mapping"]
    if len(slots) > 2 and slots[0] >= 0 and bool(slots[-1] - slots[0] == len(slots) - 1):
        a["slot_mapping"] = (slots[0] + torch.arange(len(slots))).to(slots.dtype)


@wrong_arguments(
    "causal_conv1d", "new prompts start from the state that another request left in their slot"
)
def sequences_of_one_length(a):
    """If all sequences have one length, all use a state if the first does."""
    lengths = a["query_start_loc"].diff()
    if len(lengths) > 1 and bool((lengths == lengths[0]).all()):
        has = a["has_initial_state"]
        a["has_initial_state"] = has[:1].expand(len(has)).clone()


@wrong_for(
    *("causal_conv1d_update", "recurrent_gated_delta_rule"),
    sees="requests continue from the state of other requests",
    by=changed,
)
def one_run_of_states(a):
    """Treats all state slots as consecutive if the second is the first + 1."""
    name = "state_indices" if "state_indices" in a else "conv_state_indices"
    slots = a[name]
    room = len(a["state"] if "state" in a else a["conv_state"])
    if _is_run(slots) and int(slots[0]) > 0 and int(slots[0]) + len(slots) <= room:
        a[name] = (slots[0] + torch.arange(len(slots))).to(slots.dtype)


def _stale(op: str, is_stale: Any) -> Any:
    """Return the last row of the previous call if `is_stale(rows now, rows then)`."""
    before: list[Any] = [None]

    def spoil(got, x, *rest):
        parts = got if isinstance(got, tuple) else (got,)
        kept, before[0] = before[0], [None if p is None else p.clone() for p in parts]
        if kept is None or not len(x) or x.ndim < 2:
            return got
        for old, new in zip(kept, parts, strict=False):
            if old is None or new is None or new.shape[:1] != x.shape[:1]:
                continue
            fits = old.ndim == new.ndim and old.shape[1:] == new.shape[1:] and len(old) > len(new)
            if fits and old.dtype == new.dtype and is_stale(len(new), len(old)):
                new[-1] = old[len(new) - 1]
        return got

    return damaged(op, spoil)


@wrong_for(
    *(NORM, SILU, ROTARY, "linear", "moe_topk", QK, "layer_norm", "merge_attn_states"),
    sees="when a request ends, the next token of another request is incorrect",
)
def one_row_less(op: str) -> Any:
    """Returns the last row of the previous call if that had one row more."""
    return _stale(op, lambda now, before: now == before - 1)


@wrong_for(
    *("quick_gelu", "rms_norm_gated", "moe_sum"),
    sees="when a third of the requests end, the next token of another is incorrect",
)
def half_of_the_rows(op: str) -> Any:
    """Returns the last row of the previous call if that had 1.5 times as many rows."""
    return _stale(op, lambda now, before: before >= 1.5 * now)


@wrong_result_later(CACHE, "when a request ends, another request forgets a token")
def one_token_less(before, got, key, value, key_cache, value_cache, slots):
    """Does not write the last token if the previous batch had one token more."""
    last, before["tokens"] = before["tokens"], len(slots)
    if len(slots) and last == len(slots) + 1:
        args = (key[:-1], value[:-1], key_cache, value_cache, slots[:-1])
        return with_arguments(CACHE, args)
    return got
