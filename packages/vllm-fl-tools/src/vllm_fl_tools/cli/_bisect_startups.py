"""Finds the part that ends, hangs or corrupts a startup.

To need few startups, a search begins with vLLM without vllm-fl, because a failure without vllm-fl
does not depend on parts. Then it tries the startup as configured, the parts in the text of the
failure, and halves of the parts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

from ._bisect_search import Culprit, Verdict, search
from ._engines import EngineError
from ._failures import read_log
from ._parts import NEIGHBOUR, Changes, Parts
from ._show import UsageError

VLLM_FL = "vllm-fl"
"""A part of every engine except stock vLLM: vllm-fl itself."""

MEDIAN = 0.2
"""Median difference in log-probability from stock vLLM, in nats, above which a startup is wrong.
Rounding to bfloat16 accounts for 0.03. The comparison of outputs finds smaller errors."""

FAR, FAR_SHARE = 1.0, 0.1
"""Maximum difference in nats, and the share of tokens that may exceed it (with other experts)."""

TIMES, LEAST_LIMIT = 5, 60.0
"""Time limit of a startup: a multiple of the time of stock vLLM, and the minimum in seconds."""

REPEATS = 2
"""Number of startups with all parts, to determine whether a failure is reproducible."""

Result = tuple[str, list[Culprit]]
"""The status of a search and the culprits."""

Tried = dict[frozenset[str], Verdict]
"""Disabled parts -> verdict of the startup."""

Score = Mapping[str, Any]
"""The result of `integration.workload`'s `score`."""

TryStartup = Callable[[str, Collection[str], bool, float | None], Score]
"""(description, disabled parts, whether launches block, time limit in seconds) -> score. The engine
has no vllm-fl if VLLM_FL is one of the parts. Raises EngineError or UsageError.
"""


class Startups:
    """The startups of one search.

    `limit` is the seconds of a startup; None for a multiple of the time of stock vLLM.
    """

    def __init__(self, parts: Parts, start: TryStartup, limit: float | None = None) -> None:
        self._parts, self._start, self._limit = parts, start, limit
        self._stock: Score | None = None
        self.blocking, self.count = True, 0

    @property
    def what(self) -> dict[str, str]:
        """Part -> its description."""
        return {key: part.what for key, part in self._parts.by_key.items()}

    def changes(self, off: Collection[str]) -> Changes:
        """Return the settings that disable these parts, and the parts that depend on them."""
        gone = {*off, *(below for key in off for below in self._parts.below.get(key, ()))}
        return self._parts.changes(gone)

    def search(self) -> Result:
        """Search for the parts at fault.

        Returns:
            (status, culprits). The status is `right`, `found`, `stock` (vLLM fails without vllm-fl
            and neighbours), `elsewhere` (vllm-fl fails without any part), or `unsteady` (the
            failure is not reproducible). Culprits have parts only if the status is `found`.

        Raises:
            UsageError: vLLM rejects the user's arguments.
        """
        by_key = self._parts.by_key
        stock = bare = self._try("stock", {VLLM_FL})
        if stock.how:
            neighbours = frozenset(key for key, part in by_key.items() if part.kind == NEIGHBOUR)
            if neighbours:
                bare = self._try("stock, without neighbours", {VLLM_FL, *neighbours})
            if bare.how:
                return "stock", [Culprit((), bare)]
            return self._among(neighbours, {frozenset(): stock, neighbours: bare}, {VLLM_FL})
        asked = self._try("as configured", ())
        if not asked.how:  # it may fail only if launches do not block
            self.blocking = False
            asked = self._try("as configured", ())
        if not asked.how:
            return "right", []
        status, found = self._among(by_key, {frozenset(): asked})
        again = (self._try("as configured, again", ()).how for _ in range(REPEATS))
        if status != "found" and not all(again):
            status = "unsteady"
        return status, found

    def _among(self, parts: Collection[str], tried: Tried, off: Collection[str] = ()) -> Result:
        """Search among these parts, without the parts in `off`; `tried` has earlier startups."""

        def trial(on: tuple[str, ...]) -> Verdict:
            gone = self._parts.without(on) & {*parts}
            if gone not in tried:
                name = f"{len(parts) - len(gone)} of {len(parts)} parts"
                tried[gone] = self._try(name, gone | {*off})
            return tried[gone]

        return search(parts, trial, self._parts.below)

    def _try(self, name: str, off: Collection[str]) -> Verdict:
        """Start an engine without some parts, and return the verdict."""
        self.count += 1
        started = time.monotonic()
        try:
            score = self._start(name, off, self.blocking, self._limit)
        except EngineError as error:
            return self._failed(error)
        except UsageError as error:
            if self._stock is None:
                raise
            why = error.message  # stock vLLM accepted the arguments
            return Verdict("ended", why, self._parts.likely(why))
        if self._stock is None:
            self._stock = score
            took = time.monotonic() - started
            self._limit = self._limit or max(LEAST_LIMIT, TIMES * took)
        why = fault(self._stock, score)
        return Verdict("wrong" if why else "", why, self._parts.likely(why))

    def _failed(self, error: EngineError) -> Verdict:
        raised, names = read_log(error.log)
        why = raised or "it crashed without an error message"
        if error.hung:
            why = "it did not answer" + (f" within {self._limit:.0f} s" if self._limit else "")
        if error.ran:
            why += f", while running {error.ran}"
        how = "hung" if error.hung else "ended"
        return Verdict(how, why, self._parts.likely(f"{raised} {error.ran}", names))


def fault(stock: Score, other: Score) -> str:
    """Return the error of log-probabilities compared with stock vLLM; empty if similar."""
    theirs, ours = [*chain(*stock["prefill"])], [*chain(*other["prefill"])]
    for number, tokens in enumerate(stock["tokens"]):
        pairs = zip(tokens, other["tokens"][number], strict=False)
        # Tokens after the first difference are conditioned on different tokens.
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(tokens) - 1)
        theirs += stock["decode"][number][: same + 1]
        ours += other["decode"][number][: same + 1]
    if broken := sum(not math.isfinite(value) for value in ours):
        return f"{broken} of {len(ours)} log-probabilities are not finite"
    differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    median = statistics.median(differences)
    share = sum(difference > FAR for difference in differences) / len(differences)
    if median <= MEDIAN and share <= FAR_SHARE:
        return ""
    return (
        f"the log-probabilities differ from stock vLLM's by {median:.2f} nats in the median, and "
        f"{share:.0%} of them by more than {FAR:.0f}"
    )
