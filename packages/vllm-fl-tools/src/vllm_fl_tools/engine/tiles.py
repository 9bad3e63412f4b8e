"""Searching the tiles of vLLM's Triton kernel for routed experts: from vLLM's own, step by step.

For `vllm-fl tune` alone, as `tuning.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    "GROUP_SIZE_M": (1, 16, 32),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
"""The values of each part: a neighbour differs by one step of one part."""

SEARCHED = (1, 64, 1024, 16, 256, 4096, 4)
"""Numbers of tokens at which steps are tried, in the order of their weight."""

STEP = 1.01
"""What vLLM's own time is at least by that of a step which is taken together with others."""

BETWEEN = (2, 8, 24, 32, 48, 96, 128, 512, 1536, 2048, 3072)
"""Those at which only what won nearby is: vLLM takes the entry of the nearest number."""

Measure = Callable[[int, Sequence[Tiles]], Measured]
"""(tokens, configurations) -> what came of them beside vLLM's own; each goes by its `label`."""


def label(tiles: Tiles) -> str:
    """A configuration's name, as `16x64x128 g1 w4 s4`."""
    blocks = "x".join(str(tiles[f"BLOCK_SIZE_{name}"]) for name in "MNK")
    parts = {"g": "GROUP_SIZE_M", "w": "num_warps", "s": "num_stages"}
    return " ".join([blocks, *(f"{k}{tiles[name]}" for k, name in parts.items() if name in tiles)])


def neighbours(tiles: Tiles) -> Iterator[tuple[str, Tiles]]:
    """(the part in which it differs, the configuration) of each that is one step away."""
    for part, ladder in LADDERS.items():
        if part not in tiles:
            continue
        below = [value for value in ladder if value < tiles[part]]
        above = [value for value in ladder if value > tiles[part]]
        for value in (*below[-1:], *above[:1]):
            yield part, {**tiles, part: value}


@dataclass(frozen=True)
class Chosen:
    """What vLLM shall take for a number of tokens.

    Args:
        tiles: the configuration.
        us: how long a call takes, µs; None where it was not measured.
        own_us: the same with vLLM's own configuration.
        ratio: the second by the first, round by round; None where vLLM's own stays.
    """

    tiles: Tiles
    us: float | None = None
    own_us: float | None = None
    ratio: float | None = None


@dataclass
class Search:
    """The search for one model's experts.

    Args:
        own: tokens -> vLLM's own configuration.
        measure: who measures.
        seconds: after which no further steps are tried; what is left keeps vLLM's own.
        clock: seconds.
    """

    own: Callable[[int], Tiles]
    measure: Measure
    seconds: float
    clock: Callable[[], float] = time.monotonic
    chosen: dict[int, Chosen] = field(default_factory=dict, init=False)

    def run(self, largest: int) -> dict[int, Chosen]:
        """What shall be taken, by the number of tokens, in ascending order.

        Args:
            largest: the largest batch, in tokens.

        Every number of `SEARCHED` and `BETWEEN` up to it is there, at which vLLM's own stays as
        well: of a file vLLM takes the entry of the nearest number.
        """
        end = self.clock() + self.seconds
        for tokens in (n for n in SEARCHED if n <= largest):
            if self.clock() < end:
                self._step(tokens)
        searched = sorted(self.chosen)
        for tokens in (n for n in BETWEEN if n <= largest):
            near = [pair for pair in pairwise(searched) if pair[0] < tokens < pair[1]]
            beside = [n for pair in near for n in pair] or searched[-1:]
            tried = {label(self.chosen[n].tiles): self.chosen[n].tiles for n in beside}
            tried.pop(label(self.own(tokens)), None)
            if tried and self.clock() < end:
                self._decide(tokens, [*tried.values()])
        every = (n for n in (*SEARCHED, *BETWEEN) if n <= largest)
        return {n: self.chosen.get(n, Chosen(self.own(n))) for n in sorted(every)}

    def _step(self, tokens: int) -> None:
        """Try all steps from vLLM's own, then all together that gain by themselves."""
        own = self.own(tokens)
        steps = [*neighbours(own)]
        known = [one.tiles for one in self.chosen.values()]
        found = self._decide(tokens, [*(tiles for _, tiles in steps), *known])
        gains: dict[str, tuple[float, int]] = {}
        for part, tiles in steps:
            ratio = found.ratio(label(tiles)) or 0.0
            if ratio > max(STEP, gains.get(part, (0.0, 0))[0]):
                gains[part] = ratio, tiles[part]
        if not gains:
            return
        joined = {**own, **{part: value for part, (_, value) in gains.items()}}
        best = max(gains, key=lambda part: gains[part][0])
        further = [tiles for part, tiles in neighbours({**own, best: gains[best][1]})]
        more = [joined, *further] if len(gains) > 1 else further
        self._decide(tokens, [self.chosen[tokens].tiles, *more])

    def _decide(self, tokens: int, tiles: Sequence[Tiles]) -> Measured:
        own = self.own(tokens)
        named = {label(one): one for one in tiles}
        named.pop(label(own), None)
        found = self.measure(tokens, [*named.values()])
        took = {figure.impl: figure.us for figure in found.figures()}
        winner, own_us = found.winner, took.get(OWN)
        if winner in named:
            chosen = Chosen(named[winner], took.get(winner), own_us, found.ratio(winner))
        else:
            chosen = Chosen(own, own_us, own_us)
        before = self.chosen.get(tokens)
        if before is None or (chosen.ratio or 1.0) > (before.ratio or 1.0):
            self.chosen[tokens] = chosen
        return found
