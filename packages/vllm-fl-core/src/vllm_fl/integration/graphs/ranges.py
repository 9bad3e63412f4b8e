"""Ranges of token counts that vLLM compiles separately.

In mode VLLM_COMPILE vLLM compiles the graphs separately for each range of token counts. If an op of
vllm-fl's graph passes is `stock` at all sizes of a range, the range's graph keeps the original
operator. vllm-fl therefore splits vLLM's range further. vLLM's ranges cannot end at a single token,
so 1 is a separate size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...dispatch.chain import Chain
from ...dispatch.resolver import STOCK

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig

MAX_RANGES = 2
"""Maximum number of ranges to compile for orders by size. Each range is compiled separately, which
makes startup longer."""


class Range(NamedTuple):
    first: int
    last: int

    def without(self, sizes: Collection[int]) -> Range:
        """Return the range with `sizes` removed at its ends, because these sizes are compiled
        separately. It never becomes empty."""
        first, last = self
        while first < last and first in sizes:
            first += 1
        while last > first and last in sizes:
            last -= 1
        return Range(first, last)


def is_stock(chain: Chain, sizes: Range) -> bool:
    """Return whether vLLM's implementation is the first choice for all calls of these sizes."""
    below = 0
    for ceiling, (first, *_) in chain.rows:
        up_to = sizes.last if ceiling is None else ceiling
        if below < sizes.last and sizes.first <= up_to and first.impl_id != STOCK.impl_id:
            return False
        below = up_to
    return True


def range_edge(chains: Iterable[Chain], largest: int, captured: int = 0) -> int | None:
    """Return the last token count of the first of `MAX_RANGES` ranges, or None if no range would
    keep an original operator.

    The first range ends at the maximum tokens of a row. The gain of a kept operator is measured in
    doublings of the token count: the ranges from 64 to 128 and from 4096 to 8192 have equal gains.
    The best split has the largest total gain above `captured`, the largest batch with a captured
    graph, because the host launches each operator there. Equal splits are compared by the gain over
    all sizes, then by larger edges.
    """
    chains = [*chains]
    edges = {n for chain in chains for n, _ in chain.rows if n and n < largest}

    def gained(edge: int, beyond: int) -> float:
        return round(
            sum(
                math.log2(high / max(low, beyond, 0.5))
                for low, high in ((0, edge), (edge, largest))
                for chain in chains
                if high > beyond and is_stock(chain, Range(low + 1, high))
            ),
            6,
        )

    useful = [edge for edge in edges if gained(edge, 0)]
    return max(useful, key=lambda n: (gained(n, captured), gained(n, 0), n), default=None)


def is_compiled_by_range(vllm_config: VllmConfig) -> bool:
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    is_inductor = compilation.backend in ("", "inductor")
    return is_inductor and compilation.mode == CompilationMode.VLLM_COMPILE


def split(
    vllm_config: VllmConfig, chains: Collection[Chain], entry: MutableMapping[str, Any]
) -> None:
    """Split vLLM's compile ranges for a plan, and undo the split of an earlier plan. `chains` has
    the candidates of ops that a graph pass replaces only at some sizes. `entry` stores the added
    edge for a later call."""
    compilation = vllm_config.compilation_config
    if (ours := entry.pop("edge", None)) == 1:
        compilation.compile_sizes = [n for n in compilation.compile_sizes if n != 1]
    elif ours is not None:
        kept = (n for n in compilation.compile_ranges_endpoints if n != ours)
        compilation.compile_ranges_endpoints = [*kept]
    if not chains or not is_compiled_by_range(vllm_config):
        return
    largest = vllm_config.scheduler_config.max_num_batched_tokens
    captured = max(compilation.cudagraph_capture_sizes or (), default=0)
    edge, ends = range_edge(chains, largest, captured), compilation.compile_ranges_endpoints or ()
    if edge == 1 and _can_be_alone(compilation):
        entry["edge"] = 1
        compilation.compile_sizes = [1, *(compilation.compile_sizes or ())]
    elif edge not in (None, 1, *ends):
        entry["edge"] = edge
        compilation.compile_ranges_endpoints = sorted({*ends, edge})


def _can_be_alone(compilation: CompilationConfig) -> bool:
    """Whether 1 may be added to `compile_sizes`. vLLM would also compile encoders for it, with 1 as
    each symbolic size, which some of their shapes do not allow."""
    sizes = compilation.compile_sizes or ()
    return 1 not in sizes and not getattr(compilation, "compile_mm_encoder", False)


def compiled_range(vllm_config: VllmConfig) -> Range:
    """Return the token counts of the graph that vLLM is compiling."""
    from vllm.compilation.passes.inductor_pass import get_pass_context

    compiled = get_pass_context().compile_range
    sizes = vllm_config.compilation_config.compile_sizes or ()
    return Range(compiled.start, compiled.end).without(sizes)
