"""Numerics of the two attention operators: paged attention, and writing the paged cache. From
torch_npu's documentation of each (op-plugin, docs/zh/custom_APIs/torch_npu), for packed sequences
(`input_layout="TND"`) without quantisation. Calls that it excludes, or that are not needed here,
raise an error. Results that it leaves undefined are NaN. The band of `sparse_mode=4` is
`pre_tokens` keys before the query's key and `next_tokens` after it, like the expected values in
op-plugin's tests of fused attention."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from .calls import note
from .operators import demand, numerics

FIA = "npu_fused_infer_attention_score"
SCATTER = "npu_scatter_pa_kv_cache"

HALVES = (torch.float16, torch.bfloat16)
PACKED_HEADS = (64, 128, 192)
MOST_SEQUENCES = 4096
LARGEST = 2**31 - 1


@numerics(FIA)
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = LARGEST,
    next_tokens: int = LARGEST,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each packed sequence's queries over its own keys."""
    demand(not others, FIA, f"no {', '.join(others)} in this emulation")
    demand(input_layout == "TND", FIA, f"no layout {input_layout} in this emulation")
    demand(query.ndim == 3, FIA, f"TND has 3 dimensions, not {query.ndim}")
    demand(all(t.is_contiguous() for t in (query, key, value)), FIA, "not contiguous")
    demand(query.dtype in HALVES, FIA, f"no queries of {query.dtype}")
    demand(query.dtype == key.dtype == value.dtype, FIA, "dtypes differ")
    demand(key.shape == value.shape, FIA, "keys and values differ in shape")
    tokens, heads, size = query.shape
    kv_heads = num_key_value_heads or num_heads
    demand(heads == num_heads, FIA, f"num_heads is {num_heads}, query has {heads}")
    demand(heads % kv_heads == 0 and heads // kv_heads <= 64, FIA, f"{heads} over {kv_heads} heads")
    demand(size in PACKED_HEADS, FIA, f"TND takes heads of {PACKED_HEADS}, not {size}")

    demand(bool(actual_seq_lengths), FIA, "TND needs actual_seq_lengths")
    demand(bool(actual_seq_lengths_kv), FIA, "TND needs actual_seq_lengths_kv")
    ends, kv = list(actual_seq_lengths), list(actual_seq_lengths_kv)
    demand(len(ends) == len(kv) <= MOST_SEQUENCES, FIA, f"{len(ends)} and {len(kv)} sequences")
    demand(_rises(ends), FIA, f"actual_seq_lengths {ends} do not add up")
    demand(ends[-1] == tokens, FIA, f"actual_seq_lengths end at {ends[-1]} of {tokens} tokens")
    spans = list(itertools.pairwise([0, *ends]))

    if block_table is None:
        demand(key.ndim == 3, FIA, f"TND keys have 3 dimensions, not {key.ndim}")
        demand(tuple(key.shape[1:]) == (kv_heads, size), FIA, f"keys of {tuple(key.shape)}")
        demand(_rises(kv) and kv[-1] == len(key), FIA, f"actual_seq_lengths_kv {kv} do not add up")
        rows = [torch.arange(*span) for span in itertools.pairwise([0, *kv])]
    else:
        demand(
            key.ndim == 3, FIA, f"paged keys are (blocks, tokens, heads * size), not {key.ndim}-d"
        )
        demand(key.shape[1] == block_size, FIA, f"block_size {block_size}, blocks {key.shape[1]}")
        demand(key.shape[2] == kv_heads * size, FIA, f"keys of {key.shape[2]} features")
        prompts = any(end - start > 1 for start, end in spans)
        fits = block_size % 128 == 0 if prompts else block_size % 16 == 0
        demand(fits and 0 < block_size <= 512, FIA, f"no blocks of {block_size}")
        demand(block_table.dtype == torch.int32, FIA, f"block_table of {block_table.dtype}")
        demand(block_table.ndim == 2 and len(block_table) == len(kv), FIA, "block_table's shape")
        demand(block_table.is_contiguous(), FIA, "block_table not contiguous")
        room = block_table.shape[1] * block_size
        demand(all(0 <= length <= room for length in kv), FIA, f"{kv} keys, room for {room}")
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        rows = [
            _rows(table, length, block_size)
            for table, length in zip(block_table.long(), kv, strict=True)
        ]
        for row in rows:
            demand(bool(((row >= 0) & (row < len(key))).all()), FIA, "a block that does not exist")

    _check_mask(atten_mask, sparse_mode)
    _note_kinds([end - start for start, end in spans], [len(row) for row in rows], pre_tokens)
    out = torch.empty_like(query)
    for (start, end), row in zip(spans, rows, strict=True):
        keys, values = (
            t[row].view(-1, kv_heads, size).float().repeat_interleave(heads // kv_heads, 1)
            for t in (key, value)
        )
        hidden = _hidden(sparse_mode, end - start, len(row), pre_tokens, next_tokens)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0)
        seen = ~hidden.all(0)  # a block that no query sees is not read
        out[start:end] = torch.einsum("hqk,khd->qhd", weights[..., seen], values[seen])
    return out, torch.empty(0)


def _note_kinds(queries: list[int], keys: list[int], before: int) -> None:
    """Add the kinds of sequences in this call to the counts, under "attends"."""
    kinds = {
        "prompts" if new == all_ else "decoded" if new == 1 else "continued"
        for new, all_ in zip(queries, keys, strict=True)
        if new
    }
    for kind in kinds:
        note("attends", kind)
    if len(kinds) > 1:
        note("attends", "mixed")
    if any(all_ > before + 1 for all_ in keys):
        note("attends", "windowed")


def _rises(ends: list[int]) -> bool:
    return all(a <= b for a, b in itertools.pairwise([0, *ends]))


def _rows(table: Tensor, length: int, block_size: int) -> Tensor:
    position = torch.arange(length)
    return table[position // block_size] * block_size + position % block_size


def _check_mask(mask: Tensor | None, sparse_mode: int) -> None:
    """Modes 3 and 4 apply one triangle to any sequence; mode 0 has no mask here."""
    demand(sparse_mode in (0, 3, 4), FIA, f"no sparse_mode {sparse_mode} in this emulation")
    if sparse_mode == 0:
        demand(mask is None, FIA, "no whole mask in this emulation")
        return
    demand(mask is not None, FIA, f"sparse_mode {sparse_mode} needs atten_mask")
    demand(tuple(mask.shape) == (2048, 2048), FIA, f"a mask of {tuple(mask.shape)}")
    demand(mask.dtype in (torch.bool, torch.int8, torch.uint8), FIA, f"a mask of {mask.dtype}")
    demand(torch.equal(mask.bool(), _triangle()), FIA, "the mask leaves no lower triangle")


@functools.cache
def _triangle() -> Tensor:
    side = torch.arange(2048)
    return side[None] > side[:, None]


def _hidden(mode: int, queries: int, keys: int, before: int, after: int) -> Tensor:
    """(queries, keys): keys hidden from each query; the last query is at the last key."""
    ahead = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    if mode == 0:
        return torch.zeros_like(ahead, dtype=torch.bool)
    if mode == 3:
        return ahead > 0
    return (ahead > after) | (ahead < -before)


@numerics(SCATTER)
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **others: Any,
) -> None:
    """Write each token's key and value to its slot; a slot with two writes may hold anything."""
    demand(not others, SCATTER, f"no {', '.join(others)} in this emulation")
    demand(cache_mode in (None, "Norm"), SCATTER, f"no cache_mode {cache_mode} in this emulation")
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    demand(all(t.is_contiguous() for t in tensors), SCATTER, "not contiguous")
    demand(len({t.dtype for t in tensors[:4]}) == 1, SCATTER, "dtypes differ")
    demand(key.ndim == value.ndim == 3, SCATTER, f"{key.ndim}-dimensional keys in this emulation")
    demand(key_cache.ndim == value_cache.ndim == 4, SCATTER, "the cache has 4 dimensions")
    demand(key.shape[:2] == value.shape[:2], SCATTER, "keys and values differ in tokens or heads")
    demand(slot_mapping.dtype in (torch.int32, torch.int64), SCATTER, f"{slot_mapping.dtype} slots")
    demand(tuple(slot_mapping.shape) == (len(key),), SCATTER, "one slot for each token")
    slots = slot_mapping.long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        demand(new.shape[1:] == cache.shape[2:], SCATTER, f"{new.shape[1:]} into {cache.shape[2:]}")
        places = cache.view(-1, *cache.shape[2:])
        inside = (slots >= 0) & (slots < len(places))
        demand(bool(inside.all()), SCATTER, "a slot that does not exist")
        places[slots] = new
        unique, count = slots.unique(return_counts=True)
        places[unique[count > 1]] = torch.nan
