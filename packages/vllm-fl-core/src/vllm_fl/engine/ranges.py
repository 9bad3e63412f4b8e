"""Ranges of token counts that vLLM compiles separately.

vLLM can compile the graph separately for several ranges of token counts. If an op of vllm-fl's
graph passes is `stock` at all sizes of a range, the range's graph keeps the original operator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from ..dispatch.chain import Chain
from ..dispatch.resolver import STOCK

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
