"""Compare attention layers of a loaded model with a float64 reference, on the engine's KV cache.

A layer is called with metadata from vLLM's builder, on blocks of its cache, which are restored. The
reference result uses the made keys and values: layouts of caches differ between backends.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from vllm.config.vllm import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_fl.text import quote

from ..expected import Deviation
from ..oracle import worst
from .needles import Heads, Made

LOUD = 2.0**13
"""Factor of the values in blocks and slots that no query may read. They are finite: kernels may
multiply them by a weight of 0."""

LONG, LONGEST = 1100, 6000
"""Tokens of the longest sequence without a window, and of any sequence."""

ROWS = 32
"""Maximum number of compared tokens in a sequence's step, without the first and the last."""


@dataclass(frozen=True)
class AttentionRow:
    """The result for the attention layers with equal parameters in one attention group of vLLM.

    Args:
        layers: their names.
        backend: the path of the backend class.
        cases: compared steps of sequences.
        worst: the maximum error relative to the tolerance; NaN if nothing was compared.
        reason: what is incorrect, or why nothing was compared; otherwise empty.
        raised: whether the backend raised an exception.
    """

    layers: tuple[str, ...]
    backend: str
    cases: int = 0
    worst: float = math.nan
    reason: str = ""
    raised: bool = False

    @property
    def is_incorrect(self) -> bool:
        return self.worst > 1.0


def compared_attention(
    runner: Any, seed: int, planned: Container[str] | None = None, *, few: bool = False
) -> list[AttentionRow]:
    """Compare one attention layer of this rank for each set of equal parameters.

    Args:
        runner: vLLM's model runner, newer or older, with an allocated KV cache and no requests.
        seed: seed of all lengths and numbers.
        planned: the paths of planned backends. If set, other backends of vLLM are skipped.
        few: compare only the longest sequence and a drawn one.
    """
    config = runner.vllm_config
    layers = config.compilation_config.static_forward_context
    rows = []
    with torch.inference_mode(), set_current_vllm_config(config):
        for group in chain.from_iterable(getattr(runner, "attn_groups", ())):
            path, alike = path_of(group.backend), dict[Heads | str, list[str]]()
            if planned is not None and path.startswith("vllm.") and path not in planned:
                continue
            for name in group.layer_names:
                alike.setdefault(_heads(layers[name], group, config), []).append(name)
            for heads, names in alike.items():
                why = "" if isinstance(heads, Heads) else heads
                row = AttentionRow(tuple(names), path, reason=why)
                rows.append(row if row.reason else _compared(runner, group, row, seed, few))
    return rows


def path_of(backend: type) -> str:
    return f"{backend.__module__}.{backend.__qualname__}"


_arguments: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()
"""Attention layer -> the arguments of its constructor."""


@contextmanager
def recording() -> Iterator[None]:
    """Inside the block, keep the constructor arguments of attention layers for
    `compared_attention`.

    Without them, it reads the layers' attributes by vLLM's names.
    """
    make = Attention.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(layer: Any, *args: Any, **named: Any) -> None:
        make(layer, *args, **named)
        given = signature.bind(layer, *args, **named).arguments
        _arguments[layer] = {**given, **given.get("extra_impl_args", {})}

    Attention.__init__ = made
    try:
        yield
    finally:
        Attention.__init__ = make


def _heads(layer: Any, group: Any, config: Any) -> Heads | str:
    """Return the parameters of a layer, or why it cannot be compared."""
    if type(layer) is not Attention or layer.attn_type != "decoder":
        return f"no reference result for {type(layer).__name__}"
    if layer.kv_sharing_target_layer_name is not None:
        return "it reads the cache of another layer"
    parallel, kind = config.parallel_config, layer.kv_cache_dtype
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        return "no reference result for context parallelism"
    asked = _arguments.get(layer) or vars(layer.impl)
    scale, sinks = asked.get("scale"), asked.get("sinks")
    if scale is None or getattr(layer, "has_sink", False) != (sinks is not None):
        return "its backend does not keep the layer's arguments"
    scales = layer._q_scale, layer._k_scale, layer._v_scale
    if asked.get("alibi_slopes") is not None or any(each.numel() > 1 for each in scales):
        return "no reference result for ALiBi, and for cache scales of heads"
    stored = {"fp8_e5m2": torch.float8_e5m2, "fp8": current_platform.fp8_dtype()}
    is_plain = kind in ("auto", "bfloat16", "float16", "float32")
    dtype = group.kv_cache_spec.dtype if is_plain else stored.get(kind.removesuffix("_e4m3"))
    if dtype is None:
        return f"no reference result for a KV cache of {kind}"
    sizes = layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v
    cap, window = float(asked.get("logits_soft_cap") or 0.0), layer.sliding_window
    dtypes, factors = (config.model_config.dtype, dtype), tuple(map(float, scales))
    quantises = layer.query_quant is not None
    return Heads(*sizes, float(scale), window, cap, *dtypes, factors, quantises, sinks)


def _compared(runner: Any, group: Any, row: AttentionRow, seed: int, few: bool) -> AttentionRow:
    """Compare the first of layers with equal parameters; return the row with its results."""
    name = row.layers[0]
    try:
        steps = _Steps(runner, group, name, seed, few)
        with steps.restored():
            for share, problem in steps.compared():
                is_worse = not share <= row.worst
                reason = f"{name}, {problem}" if problem and is_worse else row.reason
                top = share if is_worse else row.worst
                row = replace(row, cases=row.cases + 1, worst=top, reason=reason)
    except Exception as error:  # of a backend, for metadata that it does not support
        reason = row.reason or f"{name}: it raised {quote(error)}"
        return replace(row, reason=reason, raised=True)
    return row if row.cases else replace(row, reason=f"{name}: a small cache")


class _Steps:
    """Steps of an engine for one layer: prompts, parts of prompts, and single tokens."""

    def __init__(self, runner: Any, group: Any, name: str, seed: int, few: bool) -> None:
        config, count = runner.vllm_config, runner.kv_cache_config.num_blocks
        self.config, self.group, self.name = config, group, name
        self.layer = config.compilation_config.static_forward_context[name]
        heads = _heads(self.layer, group, config)
        assert isinstance(heads, Heads)
        self.heads, self.generator = heads, torch.Generator().manual_seed(seed)
        self.length = min(config.model_config.max_model_len, LONGEST)
        # vLLM 0.32 and later convert tables of the cache's blocks to tables of the kernel's blocks
        # in the group, earlier releases in the runner.
        size = group.kv_cache_spec.block_size
        self.kernel_block = group.get_metadata_builder(0).kv_cache_spec.block_size
        self.block = size if hasattr(group, "build_metadata") else self.kernel_block
        self.cached = count * size // self.kernel_block
        of_null = size // self.block  # vLLM's block 0 is never written
        all_ends = sorted(self._all_ends())
        all_ends[-1].append(all_ends[-1][-1] + 1)  # a step of one sequence
        if few:
            another = torch.randint(len(all_ends) - 1, (1,), generator=self.generator)
            all_ends = [all_ends[another], all_ends[-1]]
        needed = [-(-ends[-1] // self.block) for ends in all_ends]
        most = min(sum(needed) * 5 // 4 + 3, (count - 1) * of_null)
        self.pool = free = of_null + torch.randperm(most, generator=self.generator)
        self.sequences: list[Made] = []
        for ends, blocks in zip(all_ends, needed, strict=True):
            if blocks < len(free):  # a small cache has no room for the longest
                self.sequences.append(Made(heads, free[:blocks], ends, self.generator))
                free = free[blocks:]
        self.decoy, self.spare = free[-1], free[:-1][:2]

    def _all_ends(self) -> Iterator[list[int]]:
        """Yield the ends of each sequence's steps: a prompt, some tokens, and two single tokens.

        Prompt lengths are near the ends of blocks, and near the length of the window.
        """
        block, window = self.block, self.heads.window or self.length
        lengths = [1, block, 2 * block, 7 * block // 2, min(LONG, self.length)]
        lengths += [window, window + block] * (window < self.length)
        near = torch.randint(-1, 2, (len(lengths),), generator=self.generator).tolist()
        for length, off in zip(lengths, near, strict=True):
            more = 1 if off else min(block, 64) + 1
            first = max(1, min(length + off, self.length - more - 3))
            yield [first, first + more, first + more + 1, first + more + 2]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the touched blocks of the cache.

        Raises:
            NotImplementedError: no dimension of the cache has its number of blocks.
        """
        cache: Tensor = self.layer.kv_cache
        dims = [dim for dim, size in enumerate(cache.shape) if size == self.cached]
        if not dims:
            raise NotImplementedError(f"{self.cached} blocks in a cache of {tuple(cache.shape)}")
        parts = self.block // self.kernel_block
        blocks = (self.pool[:, None] * parts + torch.arange(parts)).flatten()
        if len(dims) > 1:  # all blocks: such a cache is small
            blocks = torch.arange(self.cached)
        saved = cache.index_select(dims[0], blocks := blocks.to(cache.device))
        try:
            yield
        finally:
            cache.index_copy_(dims[0], blocks, saved)

    def compared(self) -> Iterator[Deviation]:
        """Run all steps; yield the error of each sequence's results in each step."""
        ends = [min(self.block, self.length)]
        loud = [Made(self.heads, each, ends, self.generator, LOUD) for each in self.pool.split(1)]
        for chosen in self._scheduled(loud):
            list(self._step(chosen, is_compared=False))
        for chosen in self._scheduled(self.sequences):
            yield from self._step(chosen)
        sizes = self.config.scheduler_config
        most = min(self.length - 2, sizes.max_num_batched_tokens)
        if len(self.spare) == 2 and 1 < self.block <= most and sizes.max_num_seqs > 1:
            yield from self._completed()

    def _completed(self) -> Iterator[Deviation]:
        """Run a step of two sequences: one completes a block, and the other reads it. vLLM's prefix
        cache has a block as soon as a scheduled step fills it."""
        size, last = self.block, self.block - 1
        writer = Made(self.heads, self.spare[:1], [last, size], self.generator, until=last)
        yield from self._step([writer])
        reader = Made(self.heads, self.spare, [size + 1], self.generator, done=size)
        for name in ("key", "value", "keys", "values"):
            getattr(reader, name)[:size] = getattr(writer, name)
        writer.until, reader.until = size, size + 1
        yield from self._step([reader, writer])

    def _scheduled(self, sequences: Sequence[Made]) -> Iterator[list[Made]]:
        """Yield the sequences of each step, in vLLM's order, with the ends of their parts."""
        sizes = self.config.scheduler_config
        for first in range(0, len(sequences), sizes.max_num_seqs):
            some = sequences[first : first + sizes.max_num_seqs]
            while any(each.done < each.ends[-1] for each in some):
                left, some = sizes.max_num_batched_tokens, some[::-1]
                for each in some:
                    each.until = each.next_end(left)
                    left -= each.size
                # First single tokens, then parts of prompts, then whole prompts.
                chosen = [each for each in some if each.size]
                yield sorted(chosen, key=lambda each: (each.size > 1, not each.done))

    def _step(self, chosen: Sequence[Made], *, is_compared: bool = True) -> Iterator[Deviation]:
        """Call the layer for one step; yield each sequence's error if it is compared."""
        h, device = self.heads, self.layer.kv_cache.device
        counts = [made.size for made in chosen]
        drawn = torch.randn(sum(counts), h.queries, h.size, generator=self.generator)
        queries = drawn.to(h.dtype).split(counts)
        rows = [*map(self._rows, counts if is_compared else ())]
        for each, query, at in zip(chosen, queries, rows, strict=False):
            query[at] = each.query(at + each.done, self.block)
        keys, values = ([getattr(each, n)[each.part] for each in chosen] for n in ("key", "value"))
        given = [torch.cat(each).flatten(1).to(device) for each in (queries, keys, values)]
        metadata, slots = self._metadata(chosen)
        of_ranks = torch.tensor([len(slots)] * self.config.parallel_config.data_parallel_size)
        where = {"num_tokens": len(slots), "num_tokens_across_dp": of_ranks}
        where["slot_mapping"] = {self.name: slots}
        with set_forward_context({self.name: metadata}, self.config, **where):
            got = self.layer(*given).unflatten(1, (h.queries, -1)).cpu()
        for each, query, mine, at in zip(chosen, queries, got.split(counts), rows, strict=False):
            positions = at + each.done
            share, problem = worst(mine[at], [each.wanted(query[at], positions)], positions)
            where_in = f"{each.size} tokens after {each.done} in blocks of {self.block}"
            yield share, problem and f"{where_in}: {problem}"
        for each in chosen:
            each.done = each.until

    def _rows(self, count: int) -> Tensor:
        """Draw tokens to compare, including the first and the last."""
        drawn = torch.randperm(count, generator=self.generator)[:ROWS]
        rows: Tensor = torch.cat([drawn, torch.tensor([0, count - 1])]).unique()
        return rows

    def _metadata(self, chosen: Sequence[Made]) -> tuple[Any, Tensor]:
        """Return vLLM's metadata of a step, and the cache slot of each token."""
        device, block, window = self.layer.kv_cache.device, self.block, self.heads.window
        table, slots = self.decoy.repeat(len(chosen), -(-self.length // block)), []
        for row, each in zip(table, chosen, strict=True):
            row[: len(each.blocks)] = each.blocks
            if window:  # vLLM frees the blocks before it
                row[: max(0, each.done - window + 1) // block] = self.decoy
            at = torch.arange(each.done, each.until)
            slots.append(each.blocks[at // block] * block + at % block)
        starts = torch.tensor([0, *accumulate(made.size for made in chosen)], dtype=torch.int32)
        lengths = torch.tensor([each.until for each in chosen], dtype=torch.int32)
        fields = {
            "query_start_loc": starts.to(device),
            "query_start_loc_cpu": starts,
            "seq_lens": lengths.to(device),
            "num_reqs": len(chosen),
            "num_actual_tokens": int(starts[-1]),
            "max_query_len": int(starts.diff().max()),
            "max_seq_len": int(lengths.max()),
            "block_table_tensor": table.to(device, torch.int32),
            "slot_mapping": (slot := torch.cat(slots).to(device)),
            "is_prefilling": starts.diff() > 1,
            "seq_lens_cpu_upper_bound": lengths,
        }
        known = CommonAttentionMetadata.__dataclass_fields__
        common = CommonAttentionMetadata(**{n: value for n, value in fields.items() if n in known})
        if hasattr(self.group, "build_metadata"):
            return self.group.build_metadata(common), slot
        return self.group.get_metadata_builder(0).build(0, common), slot
