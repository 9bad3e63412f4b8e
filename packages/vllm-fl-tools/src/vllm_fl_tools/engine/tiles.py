"""Searching the tiles of vLLM's Triton kernel for routed experts: from vLLM's own, step by step.

For `vllm-fl tune` alone, as `tuning.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from .timing import Measured

__all__ = ["OWN", "Chosen", "Search", "Tiles", "label", "neighbours"]

Tiles = Mapping[str, int]
"""A configuration of the kernel, as vLLM's files have it."""

OWN = "stock"
"""Whoever has vLLM's own configuration, among those that are measured."""

LADDERS = {
    "BLOCK_SIZE_M": (16, 32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "GROUP_SIZE_M": (1, 16, 32),
}
"""The values of each part, in the order in which parts are tried: a neighbour differs by one step
of one part."""

SEARCHED = (8, 64, 1, 16, 32, 256, 1024, 4096, 4)
"""Numbers of tokens at which steps are tried, in the order of their weight: decoding first."""

BETWEEN = (128, 2048, 512, 24, 48, 2, 96, 1536, 3072)
"""Those at which only what won nearby is: vLLM takes the entry of the nearest number."""

KEPT = 0.15
"""The share of the seconds that is kept for those between."""

Measure = Callable[[int, Sequence[Tiles]], Measured]
"""(tokens, configurations) -> what came of them beside vLLM's own; each goes by its `label`."""


def label(tiles: Tiles) -> str:
    """A configuration's name, as `16x64x128 g1 w4 s4`."""
    blocks = "x".join(str(tiles[f"BLOCK_SIZE_{name}"]) for name in "MNK")
    parts = {"g": "GROUP_SIZE_M", "w": "num_warps", "s": "num_stages"}
    return " ".join([blocks, *(f"{k}{tiles[name]}" for k, name in parts.items() if name in tiles)])


def neighbours(tiles: Tiles, part: str) -> Iterator[Tiles]:
    """The configurations that are one step of this part away."""
    if part not in tiles:
        return
    below = [value for value in LADDERS[part] if value < tiles[part]]
    above = [value for value in LADDERS[part] if value > tiles[part]]
    for value in (*below[-1:], *above[:1]):
        yield {**tiles, part: value}


@dataclass(frozen=True)
class Chosen:
    """What vLLM shall take for a number of tokens.

    Args:
        tiles: the configuration.
        us: how long a call takes, µs; None where it was not measured.
        own_us: the same with vLLM's own configuration.
        ratio: the second by the first, round by round; None where vLLM's own stays.
        tried: how many others were tried, those that do not work among them.
        cut_short: whether the seconds were over before all was tried.
    """

    tiles: Tiles
    us: float | None = None
    own_us: float | None = None
    ratio: float | None = None
    tried: int = 0
    cut_short: bool = False


@dataclass
class Search:
    """The search for one model's experts.

    Args:
        own: tokens -> vLLM's own configuration.
        measure: who measures.
        seconds: after which nothing further is tried.
        clock: seconds.
    """

    own: Callable[[int], Tiles]
    measure: Measure
    seconds: float
    clock: Callable[[], float] = time.monotonic
    chosen: dict[int, Chosen] = field(default_factory=dict, init=False)
    _tried: dict[int, set[str]] = field(default_factory=dict, init=False)

    def run(self, largest: int) -> dict[int, Chosen]:
        """What shall be taken, by the number of tokens, in ascending order.

        Args:
            largest: the largest batch, in tokens.

        Every number of `SEARCHED` and `BETWEEN` up to it is there, at which vLLM's own stays as
        well: of a file vLLM takes the entry of the nearest number.
        """
        searched, between = ([n for n in of if n <= largest] for of in (SEARCHED, BETWEEN))
        every = sorted((*searched, *between))
        self.chosen = {n: Chosen(self.own(n)) for n in every}
        self._tried = {n: {label(self.own(n))} for n in every}
        start = self.clock()
        self._search(searched, start + (1 - KEPT) * self.seconds)
        searched.sort()
        for tokens in between:
            near = [pair for pair in pairwise(searched) if pair[0] < tokens < pair[1]]
            beside = [n for pair in near for n in pair] or searched[-1:]
            self._try(tokens, [self.chosen[n].tiles for n in beside], start + self.seconds)
        return self.chosen

    def _search(self, searched: Sequence[int], end: float) -> None:
        """Steps of one part at all sizes, then of the next: what is compiled for one size serves
        the others, and every size has had its share when the seconds are over."""
        steps = True
        while steps:
            steps = False
            for part in LADDERS:
                for tokens in searched:
                    best = self.chosen[tokens].tiles
                    steps |= self._try(tokens, [*neighbours(best, part)], end)

    def _try(self, tokens: int, tiles: Sequence[Tiles], end: float) -> bool:
        """Measure those that are new at this size, beside the best so far; whether it was done."""
        new = {label(one): one for one in tiles if label(one) not in self._tried[tokens]}
        if not new:
            return False
        if self.clock() >= end:
            self.chosen[tokens] = replace(self.chosen[tokens], cut_short=True)
            return False
        own, best = self.own(tokens), self.chosen[tokens].tiles
        self._tried[tokens] |= new.keys()
        named = new if label(best) == label(own) else {label(best): best, **new}
        found = self.measure(tokens, [*named.values()])
        took = {figure.impl: figure.us for figure in found.figures()}
        winner, own_us, tried = found.winner, took.get(OWN), len(self._tried[tokens]) - 1
        if winner in named:
            ratio = found.ratio(winner)
            self.chosen[tokens] = Chosen(named[winner], took[winner], own_us, ratio, tried)
        else:
            self.chosen[tokens] = Chosen(own, own_us, own_us, tried=tried)
        return True
