"""Find the part that ends, hangs or corrupts a startup.

The order takes the fewest startups: vLLM without vllm-fl, since a failure of it says nothing about
parts; the startup as the user has it; the parts that the failure names; halves of the parts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

from ._engines import EngineError
from ._failures import read_log
from ._parts import Changes, Parts
from ._search import Culprit, Verdict, search
from ._show import UsageError

__all__ = ["LEAST_LIMIT", "TIMES", "Start", "Startups", "fault"]

MEDIAN = 0.2
"""Nats: the median difference from the log-probabilities of stock vLLM from which a startup is
wrong. Rounding to bfloat16 makes up 0.03. Smaller errors are found by comparing outputs."""

FAR, FAR_SHARE = 1.0, 0.1
"""Nats, and the share of tokens that may differ by more: other experts are chosen for a few."""

TIMES, LEAST_LIMIT = 5, 60.0
"""The time limit of a startup: a multiple of the seconds of stock vLLM, and the least seconds."""

REPEATS = 2
"""Startups with all parts that show whether a failure comes and goes."""

Score = Mapping[str, Any]
"""The result of `integration.workload`'s `score`."""

Start = Callable[[str, Collection[str] | None, bool, float | None], Score]
"""(description, parts that are left out, whether launches block, time limit in seconds) -> score.
Without vllm-fl if the parts are None. It raises EngineError or UsageError."""


class Startups:
    """The startups of one search.

    Args:
        parts: all of them.
        start: starts an engine.
        limit: seconds that a startup may take; None for a multiple of those of stock vLLM.
    """

    def __init__(self, parts: Parts, start: Start, limit: float | None = None) -> None:
        self._parts, self._start, self._limit = parts, start, limit
        self._stock: Score | None = None
        self.blocking, self.count = True, 0

    @property
    def what(self) -> dict[str, str]:
        """Part -> its description."""
        return {key: part.what for key, part in self._parts.by_key.items()}

    def changes(self, off: Collection[str]) -> Changes:
        """The changes of settings that leave these parts out, and those that need one of them."""
        gone = {*off, *(below for key in off for below in self._parts.beneath.get(key, ()))}
        return self._parts.changes(gone)

    def search(self) -> tuple[str, list[Culprit]]:
        """Search for the parts at fault.

        Returns:
            `right`; `stock`: vLLM fails without vllm-fl; `found`; `elsewhere`: it fails without any
            part; `unsteady`: the failure comes and goes. And the culprits; a status other than
            `right` and `found` has one without parts.

        Raises:
            UsageError: vLLM does not accept the user's arguments.
        """
        stock = self._try("stock", None)
        if stock.how:
            return "stock", [Culprit((), stock)]
        asked = self._try("as asked", ())
        if not asked.how:  # it may fail only if launches do not block
            self.blocking = False
            asked = self._try("as asked", ())
        if not asked.how:
            return "right", []
        every, tried = len(self._parts.by_key), {frozenset[str](): asked}

        def trial(on: tuple[str, ...]) -> Verdict:
            off = self._parts.without(on)
            if off not in tried:
                tried[off] = self._try(f"{every - len(off)} of {every} parts", off)
            return tried[off]

        status, found = search(self._parts.by_key, trial, beneath=self._parts.beneath)
        if status != "found" and not all(self._again() for _ in range(REPEATS)):
            status = "unsteady"
        return status, found

    def _again(self) -> bool:
        """Whether the startup with all parts fails again."""
        return bool(self._try("as asked, again", ()).how)

    def _try(self, name: str, off: Collection[str] | None) -> Verdict:
        """Start an engine without some parts."""
        self.count += 1
        started = time.monotonic()
        try:
            score = self._start(name, off, self.blocking, self._limit)
        except EngineError as error:
            return self._failed(error)
        except UsageError as error:
            if self._stock is None:
                raise
            return self._verdict("ended", error.message)  # stock vLLM accepted the arguments
        if self._stock is None:
            self._stock = score
            took = time.monotonic() - started
            self._limit = self._limit or max(LEAST_LIMIT, TIMES * took)
        why = fault(self._stock, score)
        return self._verdict("wrong" if why else "", why)

    def _failed(self, error: EngineError) -> Verdict:
        raised, names = read_log(error.log)
        why = raised or "it ended without an error message"
        if error.hung:
            why = "it did not answer" + (f" within {self._limit:.0f} s" if self._limit else "")
        if error.ran:
            why += f", while it ran {error.ran}"
        how = "hung" if error.hung else "ended"
        return Verdict(how, why, self._parts.likely(f"{raised} {error.ran}", names))

    def _verdict(self, how: str, why: str) -> Verdict:
        return Verdict(how, why, self._parts.likely(why))


def fault(stock: Score, other: Score) -> str:
    """The error of an engine's log-probabilities; empty if they are like those of stock vLLM."""
    theirs, ours = [*chain(*stock["prefill"])], [*chain(*other["prefill"])]
    for number, tokens in enumerate(stock["tokens"]):
        pairs = zip(tokens, other["tokens"][number], strict=False)
        # The tokens after the first difference follow other ones.
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(tokens) - 1)
        theirs += stock["decode"][number][: same + 1]
        ours += other["decode"][number][: same + 1]
    broken = sum(not math.isfinite(value) for value in ours)
    if broken:
        return f"{broken} of {len(ours)} log-probabilities are not finite"
    differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    median = statistics.median(differences)
    share = sum(difference > FAR for difference in differences) / len(differences)
    if median <= MEDIAN and share <= FAR_SHARE:
        return ""
    return (
        f"the log-probabilities differ from stock's by {median:.2f} nats in the median, and "
        f"{share:.0%} of them by more than {FAR:.0f}"
    )
