"""Interleaved timing of several functions, and choices from the results.

The speed of a machine drifts. Therefore every function is timed once per round, in an order that
changes between rounds. Only ratios within a round are compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from vllm_fl.text import quote

from .tuning_table import KEEP_DEFAULT, Figure, Row

Timer = Callable[[], float]
"""Times a function once, and returns the µs of a call."""

ROOM = 1.02
"""Minimum speed-up over the default (median of the rounds' ratios) of a winner."""


def in_turn(
    timers: Mapping[str, Timer], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Call every timer once per round, in an order that rotates and is reversed every other round.

    Returns:
        (name -> one time per round; name -> why it was dropped). A timer that raises is dropped
        with all its times.
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
    """Return the order of a round: each rotation runs forwards and then backwards."""
    start = (number // 2) % len(names) if names else 0
    turned = [*names[start:], *names[:start]]
    return reversed(turned) if number % 2 else iter(turned)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile; a single value three times."""
    if len(values) == 1:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


@dataclass
class Measured:
    """The measurements of one op at one number of tokens.

    Args:
        tokens: of the calls.
        default: the implementation's id without a tuning table, or `stock`.
        rejected: name -> why it was not timed to the end.
        times: name -> its time in each round, µs.
        slower: name -> why it cannot win: the form in which it is slower than the default, with the
            ratio; or how much longer its launch takes, at sizes without a captured graph.
    """

    tokens: int
    default: str
    rejected: dict[str, str] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    slower: dict[str, str] = field(default_factory=dict)

    @property
    def winner(self) -> str:
        """The fastest implementation that beats the default, or `default`."""
        winners = [name for name in self.times if self._beats(name)]
        return min(winners, key=lambda name: quartiles(self.times[name])[1], default=KEEP_DEFAULT)

    @property
    def fastest(self) -> float:
        """The smallest median, µs; 0 without times."""
        return min((quartiles(of)[1] for of in self.times.values()), default=0.0)

    def ratio(self, name: str) -> float | None:
        """Return the median speed-up over the default; None if `name` is not usable."""
        found = self._ratios(name)
        return statistics.median(found) if found else None

    def _beats(self, name: str) -> bool:
        found = self._ratios(name)
        if name == self.default or not found:
            return False
        low, median, _ = quartiles(found)
        return median >= ROOM and low > 1.0

    def _ratios(self, name: str) -> list[float]:
        """Return the ratios of all rounds; empty if `name` is rejected, slower or not timed."""
        if name in self.rejected or name in self.slower or name not in self.times:
            return []
        return ratios(self.times.get(self.default, ()), self.times[name])

    def figures(self) -> Iterator[Figure]:
        """Yield the figures of the table: timed implementations, fastest first, then rejected."""
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
    return [
        default / other if other > 0 else 1.0
        for default, other in zip(defaults, others, strict=False)
    ]


def table_rows(
    measured: Sequence[Measured],
    inlined: Container[str] = frozenset(),
    edges: Sequence[int] = (),
) -> tuple[Row, ...]:
    """Return the choice for each range of tokens; neighbours with the same choice are merged.

    Args:
        measured: the measurements, one for each number of tokens.
        inlined: implementations that the compiler inlines. A graph that is compiled for a range of
            sizes has such an implementation at all sizes or at none. If winners differ and include
            an inlined implementation, a range therefore has one row: an implementation that is
            nowhere slower than the default, or `default`.
        edges: the last number of tokens of each range except the last; empty if vLLM compiles the
            model once for all sizes.
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
        found = [row for part in parts if part for row in table_rows(part, inlined)]
    rows: list[Row] = []
    for row in found:
        if rows and rows[-1].impl == row.impl:
            rows.pop()
        rows.append(row)
    return tuple(rows)


def best_edges(
    ops: Iterable[tuple[Sequence[Measured], Container[str]]], most: int
) -> tuple[int, ...]:
    """Choose how to split numbers of tokens into separately compiled ranges, for the largest gain.

    The gain of a split is the product of the speed-ups of its rows over the default, for all ops
    and numbers of tokens.

    Args:
        ops: (measurements, inlined implementations) of each op.
        most: maximum number of ranges.

    Returns:
        The `edges` of `table_rows`.
    """
    limited = [(ones, inlined) for ones, inlined in ops if is_limited(ones, inlined)]
    largest = max((one.tokens for ones, _ in limited for one in ones), default=0)
    changes = {row.up_to for ones, _ in limited for row in table_rows(ones)}

    def gained(edges: tuple[int, ...]) -> float:
        total = 0.0
        for ones, inlined in limited:
            rows = table_rows(ones, inlined, edges)
            for one in ones:
                impl = next(row.impl for row in rows if one.tokens <= row.up_to)
                total += math.log(one.ratio(impl) or 1.0)
        return round(total, 6)

    candidates = sorted(n for n in changes if n < largest)
    ways = [way for count in range(most) for way in combinations(candidates, count)]
    return min(ways, key=lambda way: (-gained(way), len(way), way), default=())


def is_limited(measured: Iterable[Measured], inlined: Container[str]) -> bool:
    """Return whether the winners differ and include an inlined implementation."""
    winners = [(one.winner, one.default) for one in measured]
    serving = {default if winner == KEEP_DEFAULT else winner for winner, default in winners}
    return len(serving) > 1 and any(name in inlined for name in serving)


def _everywhere(ones: Sequence[Measured]) -> str:
    """Return the fastest winner that is nowhere slower than the default, or `default`."""
    speeds = {}
    for name in {one.winner for one in ones} - {KEEP_DEFAULT}:
        ratios_of = [one.ratio(name) for one in ones]
        if all(ratio is not None and ratio >= 1 / ROOM for ratio in ratios_of):
            speeds[name] = statistics.geometric_mean(r for r in ratios_of if r is not None)
    return max(sorted(speeds), key=lambda name: speeds[name], default=KEEP_DEFAULT)
