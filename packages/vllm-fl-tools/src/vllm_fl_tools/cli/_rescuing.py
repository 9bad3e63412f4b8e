"""What `vllm-fl rescue` asks of engines, and what follows from their answers.

The order is that of the fewest starts: stock alone, since nothing can be said where that fails;
all as the user has it; the parts that the failure names, if it names any; and halves. A start is
wrong where it ends, hangs, or holds the same tokens to be far less or more likely than stock does.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from ._engines import EngineError, forget
from ._failures import read_log
from ._search import UnsettledError, culprits
from ._show import UsageError
from ._suspects import Suspects

__all__ = [
    "AS_ASKED",
    "FAR",
    "FAR_SHARE",
    "LEAST_LIMIT",
    "MEDIAN",
    "STOCK",
    "TIMES",
    "Culprit",
    "Finding",
    "Rescue",
    "Start",
    "fault",
]

MEDIAN = 0.2
"""Nats: the median difference from stock's log-probabilities from which a start is wrong. Roundings
of bfloat16 make up 0.03, of a right plan and of stock alike; `bisect` looks for less."""

FAR, FAR_SHARE = 1.0, 0.1
"""Nats, and the share of tokens that may be further off: a few, as where experts are chosen."""

TIMES, LEAST_LIMIT = 5, 60.0
"""A start may take so many times stock's seconds, and so many seconds in any case."""

STOCK, AS_ASKED = "stock", "as asked"

Start = Callable[[str, frozenset[str], bool, float | None], dict[str, Any]]
"""(STOCK, AS_ASKED or what to call it, the parts that are on, whether launches block, seconds that
it may take) -> the engine's score. It raises EngineError or UsageError."""

Status = Literal["right", "found", "stock", "unsteady", "elsewhere"]


@dataclass(frozen=True)
class Culprit:
    """Parts without which the start is right: one, or several that fail only together.

    Args:
        parts: their keys.
        how: `ended`, `hung` or `wrong`.
        why: the exception, or what is wrong.
        stack: the lines of the stack, where there is one.
    """

    parts: tuple[str, ...]
    how: str
    why: str
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """What came of it.

    Args:
        status: `right`: nothing fails; `found`; `stock`: that fails by itself; `unsteady`: a
            failure that comes and goes; `elsewhere`: vllm-fl fails with every part left out.
        asked: how the start as asked, or stock, failed; None where it is right.
        culprits: of a status `found`.
        rest: the parts with which the start is right.
        blocking: whether the failure is there with blocking launches.
        starts: engines that were started, by this run and by those that it goes on from.
        seconds: what they took.
    """

    status: Status
    asked: Culprit | None
    culprits: tuple[Culprit, ...]
    rest: frozenset[str]
    blocking: bool
    starts: int
    seconds: float


class Rescue:
    """The engines that one question takes, and how each fared.

    Args:
        suspects: the parts.
        start: starts an engine.
        limit: seconds that a start may take; None for some times what stock takes.
        repeats: how often a start as asked is tried again where answers contradict each other.
    """

    def __init__(
        self,
        suspects: Suspects,
        start: Start,
        limit: float | None = None,
        repeats: int = 2,
    ) -> None:
        self._suspects, self._start = suspects, start
        self._known: dict[tuple[str, frozenset[str], bool], dict[str, Any]] = {}
        self._limit, self._repeats = limit, repeats
        self._blocking = True
        self._named: tuple[str, ...] = ()

    @property
    def starts(self) -> int:
        """How many engines were started."""
        return len(self._known)

    @property
    def seconds(self) -> float:
        """What they took."""
        return float(sum(line["seconds"] for line in self._known.values()))

    def run(self) -> Finding:
        """Look for what ends, hangs or corrupts the start.

        Raises:
            UsageError: vLLM does not take the user's arguments.
        """
        every = frozenset(self._suspects.parts)
        stock = self._line(STOCK, frozenset())
        if stock["failure"]:
            return self._finding("stock", stock)
        asked = self._line(AS_ASKED, every)
        if not asked["failure"]:  # or is it only there where launches do not block?
            self._blocking = False
            asked = self._line(AS_ASKED, every)
        if not asked["failure"]:
            return self._finding("right", None, rest=every)
        last: dict[frozenset[str], dict[str, Any]] = {}

        def is_wrong(on: Sequence[str]) -> bool:
            whole = self._suspects.whole(on)
            line = asked if whole == every else self._line(f"{len(whole)} of {len(every)}", whole)
            last[frozenset(on)] = line
            self._named = tuple(line["failure"]["named"]) if line["failure"] else self._named
            return bool(line["failure"])

        def likely(rest: Sequence[str]) -> Sequence[str]:
            return [key for key in self._named if key in rest]

        beneath = self._suspects.beneath
        try:
            found = culprits(self._suspects.parts, is_wrong, likely=likely, beneath=beneath)
        except UnsettledError:
            return self._unsettled(asked)
        if () in found:
            return self._unsettled(asked, elsewhere=True)
        gone = {*chain(*found)}
        gone |= {*chain(*(beneath.get(key, ()) for key in gone))}
        named = [_culprit(parts, last.get(frozenset(parts), asked)) for parts in found]
        return self._finding("found", asked, named, rest=every - gone)

    def _unsettled(self, asked: dict[str, Any], *, elsewhere: bool = False) -> Finding:
        """Whether the failure comes and goes, or has nothing to do with the parts."""
        every = frozenset(self._suspects.parts)
        for number in range(self._repeats):
            again = self._line(f"{AS_ASKED}, again {number + 1}", every)
            if not again["failure"]:
                return self._finding("unsteady", asked)
        return self._finding("elsewhere" if elsewhere else "unsteady", asked)

    def _finding(
        self,
        status: Status,
        asked: dict[str, Any] | None,
        named: Iterable[Culprit] = (),
        rest: frozenset[str] = frozenset(),
    ) -> Finding:
        first = None if asked is None else _culprit((), asked)
        return Finding(status, first, tuple(named), rest, self._blocking, self.starts, self.seconds)

    def _line(self, kind: str, on: frozenset[str]) -> dict[str, Any]:
        """How one start fares, or has fared before."""
        key = _key(kind, on, self._blocking)
        if key in self._known:
            return self._known[key]
        stock = self._known.get(_key(STOCK, (), True))
        limit = self._limit
        if limit is None and stock is not None:
            limit = max(LEAST_LIMIT, TIMES * stock["seconds"])
        line: dict[str, Any] = {"kind": kind, "on": sorted(on), "blocking": self._blocking}
        line |= {"failure": None, "score": None}
        started = time.monotonic()
        try:
            score = self._start(kind, on, self._blocking, limit)
        except EngineError as error:
            line["failure"] = self._failure(error, limit)
        except UsageError as error:  # after stock has taken the same arguments it is no usage
            if stock is None:
                raise
            line["failure"] = self._told("ended", error.message)
        else:
            why = fault(score if stock is None else stock["score"], score)
            line["failure"] = self._told("wrong", why) if why else None
            line["score"] = score if stock is None else None
        line["seconds"] = time.monotonic() - started
        self._known[key] = line
        return line

    def _failure(self, error: EngineError, limit: float | None) -> dict[str, Any]:
        read = read_log(error.log)
        forget(error.session)
        why = read.why or "it ended without a word"
        if error.hung:
            why = f"it did not come back within {limit:.0f} s" if limit else "it did not come back"
        if error.ran:
            why += f", while it ran {error.ran}"
        named = self._suspects.likely(f"{read.why} {error.ran}", read.functions)
        how = "hung" if error.hung else "ended"
        return {"how": how, "why": why, "stack": [*read.stack], "named": [*named]}

    def _told(self, how: str, why: str) -> dict[str, Any]:
        return {"how": how, "why": why, "stack": [], "named": [*self._suspects.likely(why, ())]}


def fault(stock: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What is wrong with an engine's log-probabilities; empty where they are as stock's.

    Args:
        stock: what stock's engine answered, as `integration.workload` gives a score.
        other: what the other one answered to the same prompts.
    """
    theirs, ours = _compared(stock, other)
    broken = sum(not math.isfinite(value) for value in ours)
    if broken:
        return f"{broken} of {len(ours)} log-probabilities are not finite"
    differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    median = statistics.median(differences)
    share = sum(difference > FAR for difference in differences) / len(differences)
    if median <= MEDIAN and share <= FAR_SHARE:
        return ""
    return (
        f"the log-probabilities are {median:.2f} nats from stock's in the median, and "
        f"{share:.0%} of them more than {FAR:.0f}"
    )


def _compared(
    stock: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """(stock's log-probabilities, the other's) of all tokens of the prompts, and of those answered
    up to the first one in which the two differ."""
    theirs, ours = [*chain(*stock["prefill"])], [*chain(*other["prefill"])]
    for number, tokens in enumerate(stock["tokens"]):
        alike = zip(tokens, other["tokens"][number], strict=False)
        same = next((n for n, (a, b) in enumerate(alike) if a != b), len(tokens) - 1)
        theirs += stock["decode"][number][: same + 1]
        ours += other["decode"][number][: same + 1]
    return theirs, ours


def _culprit(parts: Sequence[str], line: Mapping[str, Any]) -> Culprit:
    failure = line["failure"]
    return Culprit(tuple(parts), failure["how"], failure["why"], tuple(failure["stack"]))


def _key(kind: str, on: Iterable[str], blocking: bool) -> tuple[str, frozenset[str], bool]:
    return kind, frozenset(on), blocking
