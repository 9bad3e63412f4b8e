"""Ranges of token counts that allow a compiler to inline one implementation of an op.

In a graph, an op with an order by size is one operator. vLLM can compile the graph separately for
several ranges of token counts. If all rows in a range have the same traceable first choice, its
code can replace the operator in that range.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise

from ..dispatch.chain import Chain
from ..plugins.types import OpImpl
from .opaque import is_inlined

MAX_RANGES = 2
"""Maximum number of ranges to compile for orders by size. Each range is compiled separately, which
makes startup longer."""


@dataclass(frozen=True, order=True)
class Range:
    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def without(self, sizes: Collection[int]) -> Range:
        """Return the range with `sizes` removed at its ends, because these sizes are compiled
        separately. It never becomes empty."""
        first, last = self.first, self.last
        while first < last and first in sizes:
            first += 1
        while last > first and last in sizes:
            last -= 1
        return Range(first, last)


def choice(chain: Chain, sizes: Range) -> OpImpl | None:
    """Return the first choice for all calls of these sizes, if its code may be inlined. Return None
    if rows differ, or if the implementation is opaque, overwrites its arguments or needs a
    layer."""
    firsts, below = {}, 0
    for ceiling, (first, *_) in chain.rows:
        up_to = sizes.last if ceiling is None else ceiling
        if below < sizes.last and sizes.first <= up_to:
            firsts[first.impl_id] = first
        below = up_to
    sole = next(iter(firsts.values())) if len(firsts) == 1 else None
    return sole if sole is not None and is_inlined(sole) else None


def range_edges(chains: Iterable[Chain], largest: int, captured: int = 0) -> tuple[int, ...]:
    """Return the last token count of each range except the last, for at most `MAX_RANGES` ranges
    that inline the most. The result is empty if nothing can be inlined.

    Ranges end only at the maximum tokens of rows. The gain of inlining an op is measured in
    doublings of the token count: the ranges from 64 to 128 and from 4096 to 8192 have equal gains.
    The best split has the largest total gain above `captured`, the largest batch with a captured
    graph, because the host launches each operator there. Equal splits are compared by the gain over
    all sizes, then by fewer ranges, then by larger edges.
    """
    able = [chain for chain in chains if any(is_inlined(first) for _, (first, *_) in chain.rows)]
    ceilings = sorted({n for chain in able for n, _ in chain.rows if n and n < largest})

    def gained(split: tuple[int, ...], beyond: int) -> float:
        return round(
            sum(
                math.log2(high / max(low, beyond, 0.5))
                for low, high in pairwise([0, *split, largest])
                for chain in able
                if high > beyond and choice(chain, Range(low + 1, high)) is not None
            ),
            6,
        )

    ways = [way for count in range(MAX_RANGES) for way in combinations(ceilings, count)]
    return max(
        ways, key=lambda way: (gained(way, captured), gained(way, 0), -len(way), way), default=()
    )
