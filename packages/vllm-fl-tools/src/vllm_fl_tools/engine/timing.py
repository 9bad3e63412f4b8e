"""Times of several functions that are measured in turn, and what follows from them.

A machine's speed drifts while it is measured: what is compared is measured next to each other, once
in every round, in an order that changes from round to round, and the ratios of a round are what
counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from vllm_fl.text import quote

from .tuned import DEFAULT, Figure, Row

__all__ = [
    "ROOM",
    "Measured",
    "Timer",
    "best_edges",
    "in_turn",
    "quartiles",
    "ratios",
    "rows_of",
]

Timer = Callable[[], float]
"""Measures once. Gives the µs of a call."""

ROOM = 1.02
"""What the default's time by a winner's must be at least, in the middle of the rounds: below that,
another implementation is not worth it."""


def in_turn(
    timers: Mapping[str, Timer], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Call every timer once a round, in an order that rotates and is reversed every other time.

    Args:
        timers: by name.
        rounds: how many.

    Returns:
        (name -> its times, as many as rounds; name -> why it was dropped). One that raises is
        dropped with all its times.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    dropped: dict[str, str] = {}
    for number in range(rounds):
        for name in _order(list(times), number):
            try:
                times[name].append(timers[name]())
            except Exception as error:
                dropped[name] = f"raised {quote(error)} while it was timed"
                del times[name]
    return times, dropped


def _order(names: list[str], number: int) -> Iterator[str]:
    """Every two rounds the same rotation, forwards and then backwards."""
    start = (number // 2) % len(names) if names else 0
    turned = [*names[start:], *names[:start]]
    return reversed(turned) if number % 2 else iter(turned)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; the value itself where it is one."""
    if len(values) == 1:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


@dataclass
class Measured:
    """What was found about one op at one number of tokens.

    Args:
        tokens: rows of the calls.
        default: what runs without a table: an implementation's id, or `stock`.
        rejected: who was not timed -> why.
        times: name -> its time in each round, µs.
        slower: who is slower than the default in a form of the op -> in which, and the ratio; or to
            launch, where no graph serves -> by what.
    """

    tokens: int
    default: str
    rejected: dict[str, str] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    slower: dict[str, str] = field(default_factory=dict)

    @property
    def winner(self) -> str:
        """The fastest of those that beat the default; else `default`."""
        winners = [name for name in self.times if self._beats(name)]
        return min(winners, key=lambda name: quartiles(self.times[name])[1], default=DEFAULT)

    @property
    def fastest(self) -> float:
        """The least median, µs; or 0."""
        return min((quartiles(of)[1] for of in self.times.values()), default=0.0)

    def ratio(self, name: str) -> float | None:
        """The default's time by `name`'s, the median of pairs; None where it may not serve."""
        found = self._ratios(name)
        return statistics.median(found) if found else None

    def _beats(self, name: str) -> bool:
        found = self._ratios(name)
        if name == self.default or not found:
            return False
        low, median, _ = quartiles(found)
        return median >= ROOM and low > 1.0

    def _ratios(self, name: str) -> list[float]:
        """None if it may not serve, or was not timed."""
        if name in self.rejected or name in self.slower or name not in self.times:
            return []
        return ratios(self.times.get(self.default, ()), self.times[name])

    def figures(self) -> Iterator[Figure]:
        """What a table says of everybody: first who was timed, the fastest before the others."""
        figures = [self._figure(name) for name in self.times if name not in self.rejected]
        yield from sorted(figures, key=lambda figure: figure.us or 0.0)
        for name, why in self.rejected.items():
            yield Figure(self.tokens, name, rejected=why)

    def _figure(self, name: str) -> Figure:
        times, defaults = self.times[name], self.times.get(self.default, ())
        low, median, high = quartiles(times)
        ratio = ratio_low = None
        if name != self.default and len(defaults) == len(times):
            ratio_low, ratio, _ = (round(r, 4) for r in quartiles(ratios(defaults, times)))
        return Figure(
            self.tokens,
            name,
            us=round(median, 3),
            low=round(low, 3),
            high=round(high, 3),
            n=len(times),
            ratio=ratio,
            ratio_low=ratio_low,
            slower=self.slower.get(name, ""),
        )


def ratios(defaults: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round, the default's time by the other's."""
    return [
        default / other if other > 0 else 1.0
        for default, other in zip(defaults, others, strict=False)
    ]


def rows_of(
    measured: Sequence[Measured],
    inlined: Container[str] = frozenset(),
    edges: Sequence[int] = (),
) -> tuple[Row, ...]:
    """Who serves up to which number of tokens; neighbours with one winner are one row.

    Args:
        measured: what was found, at each number of tokens.
        inlined: whose code the compiler takes into the graph around it. In graphs that are compiled
            for a range of sizes such a one serves every size or none: where the winners differ and
            one of them is inlined, a range has one row, of who is nowhere slower than the default,
            or `default`.
        edges: the last number of tokens of each range but the last; none where vLLM traces and
            compiles a model once.
    """
    ones = sorted(measured, key=lambda one: one.tokens)
    if not is_limited(ones, inlined):
        found = [Row(one.tokens, one.winner) for one in ones]
    elif not edges:
        return (Row(ones[-1].tokens, _everywhere(ones)),)
    else:
        ends = [*edges, ones[-1].tokens]
        parts = [
            [one for one in ones if low < one.tokens <= high] for low, high in pairwise([0, *ends])
        ]
        found = [row for part in parts if part for row in rows_of(part, inlined)]
    rows: list[Row] = []
    for row in found:
        if rows and rows[-1].impl == row.impl:
            rows.pop()
        rows.append(row)
    return tuple(rows)


def best_edges(
    ops: Iterable[tuple[Sequence[Measured], Container[str]]], most: int
) -> tuple[int, ...]:
    """Where to split the numbers of tokens into ranges that are compiled apart, by what it gains.

    What a way to split gains is the product of the ratios by which the rows of all ops are then
    faster than the default, at every number of tokens.

    Args:
        ops: (what was found, whose code is inlined) of each op.
        most: how many ranges there may be.

    Returns:
        The last number of tokens of each range but the last, as `rows_of` takes them.
    """
    limited = [(ones, inlined) for ones, inlined in ops if is_limited(ones, inlined)]
    largest = max((one.tokens for ones, _ in limited for one in ones), default=0)
    changes = {row.up_to for ones, _ in limited for row in rows_of(ones)}

    def gained(edges: tuple[int, ...]) -> float:
        total = 0.0
        for ones, inlined in limited:
            rows = rows_of(ones, inlined, edges)
            for one in ones:
                impl = next(row.impl for row in rows if one.tokens <= row.up_to)
                total += math.log(one.ratio(impl) or 1.0)
        return round(total, 6)

    candidates = sorted(n for n in changes if n < largest)
    ways = [way for count in range(most) for way in combinations(candidates, count)]
    return min(ways, key=lambda way: (-gained(way), len(way), way), default=())


def is_limited(measured: Iterable[Measured], inlined: Container[str]) -> bool:
    """Whether winners differ, and one of them is inlined."""
    winners = [(one.winner, one.default) for one in measured]
    serving = {default if winner == DEFAULT else winner for winner, default in winners}
    return len(serving) > 1 and any(name in inlined for name in serving)


def _everywhere(ones: Sequence[Measured]) -> str:
    """The fastest of those who win somewhere and lose nowhere; else `default`."""
    speeds = {}
    for name in {one.winner for one in ones} - {DEFAULT}:
        ratios_of = [one.ratio(name) for one in ones]
        if all(ratio is not None and ratio >= 1 / ROOM for ratio in ratios_of):
            speeds[name] = statistics.geometric_mean(r for r in ratios_of if r is not None)
    return max(sorted(speeds), key=lambda name: speeds[name], default=DEFAULT)
