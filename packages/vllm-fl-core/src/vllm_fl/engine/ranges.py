"""Ranges of token counts: where a compiler that compiles each apart may inline one implementation.

An op that is ordered by size is one operator in a traced graph, since a graph is traced once. Where
vLLM compiles that graph again for each range of sizes, a range that lies in rows of one traceable
first choice needs no operator: that implementation's own code can stand in its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise

from ..dispatch.chain import Chain
from ..plugins.types import OpImpl
from .opaque import is_inlined

MOST = 2
"""How many ranges a model is compiled for on account of orders by size: each is compiled anew, and
a start takes so much longer."""


@dataclass(frozen=True, order=True)
class Range:
    """Token counts from `first` up to and including `last`."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def without(self, sizes: Collection[int]) -> Range:
        """The same without the sizes at its ends that are compiled apart; as it is if none is left.

        Args:
            sizes: the token counts that have code of their own.
        """
        first, last = self.first, self.last
        while first < last and first in sizes:
            first += 1
        while last > first and last in sizes:
            last -= 1
        return Range(first, last)


def choice(chain: Chain, sizes: Range) -> OpImpl | None:
    """The implementation that serves all calls of these sizes, where its code may be inlined.

    Args:
        chain: the op's candidates, by rows.
        sizes: the token counts of the calls.

    Returns:
        None where the rows differ, or the implementation must be taken whole or writes over its
        arguments.
    """
    firsts, below = {}, 0
    for ceiling, (first, *_) in chain.rows:
        up_to = sizes.last if ceiling is None else ceiling
        if below < sizes.last and sizes.first <= up_to:
            firsts[first.impl_id] = first
        below = up_to
    sole = next(iter(firsts.values())) if len(firsts) == 1 else None
    return sole if sole is not None and is_inlined(sole) else None


def edges(chains: Iterable[Chain], largest: int, captured: int = 0) -> tuple[int, ...]:
    """Where to split the token counts, so that the most can be inlined: at most `MOST` ranges.

    What an op gains where it is inlined is counted in doublings of the token count: as much from 64
    to 128 as from 4096 to 8192. Of all ways to split at ceilings of rows that way is taken by which
    the ops gain the most beyond the captured graphs, where a host launches operators one by one. Of
    equal ones that by which they gain the most at all sizes; then the one with the fewest ranges,
    then with the largest edges.

    Args:
        chains: one for each op that is ordered by size.
        largest: the largest batch, in tokens.
        captured: the largest batch of which a graph is captured, in tokens; 0 where none is.

    Returns:
        The last token count of each range but the last; empty where nothing can be inlined.
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

    ways = [way for count in range(MOST) for way in combinations(ceilings, count)]
    return max(
        ways, key=lambda way: (gained(way, captured), gained(way, 0), -len(way), way), default=()
    )
