"""Find the op that makes the outputs of a plan less exact than a baseline's.

All engines get the same tokens, the answers of a float32 engine, and report the log-probability of
each. The differences from the float32 engine are an engine's errors. A correct plan has errors,
too, since it computes in the model's dtype: it is measured by a baseline in the same dtype.

There are two measures. The median does not change if a rounding sends a few tokens of a mixture of
experts to other experts; but it does not see an error in fewer than half of the tokens. The number
of tokens that are far off does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Protocol

from vllm_fl.errors import VllmFLError

from ._parts import Changes
from ._search import Culprit, Verdict, search

__all__ = ["BASELINE", "EXACT", "LIMIT", "NEW_TOKENS", "PLAN", "PROMPTS", "Outputs", "Start"]

EXACT, BASELINE, PLAN = "float32", "baseline", "plan"
"""The kinds of engines."""

PHASES = ("prefill", "decode")

LIMIT = 1.5
"""The median error of a correct plan, as a multiple of the baseline's.

A plan that rounds twice where the baseline rounds once has about sqrt(2) = 1.41 times its error,
and is correct. docs/measurements/verbs.md has the measurements of all limits.
"""

FAR = 10
"""The error of a token that is far off, as a multiple of the baseline's median error.

Rounding alone reached it at no token of any model without experts.
"""

FAR_TIMES, FAR_SHARE = 3, 0.02
"""The tokens of a correct plan that may be far off: a multiple of the baseline's, and in addition a
share of all tokens. Chance decides which tokens get other experts: one correct plan had up to 2.3
times as many as the baseline. The share is for baselines that have few."""

FLOOR = 1e-4
"""The least median error of a baseline: a baseline in float32 has no error of its own, and sums of
float32 in another order differ by less."""

PROMPTS, NEW_TOKENS = 16, 32
"""The number of prompts that the limits need, and of tokens that are forced after each."""

STOCK = "stock"


class BisectError(VllmFLError):
    """The plan and the baseline cannot be compared."""

    code = "FL603"


class Running(Protocol):
    """A running engine; see `cli._engines`."""

    report: dict[str, Any]
    vocabulary: int

    def ask(self, kind: str, **what: Any) -> dict[str, Any]: ...


Start = Callable[[str, Changes], AbstractContextManager[Running]]
"""(kind, changes of the user's settings) -> the engine."""

Draw = Callable[[int], list[list[int]]]
"""The size of the vocabulary -> the prompts, as token ids."""

Scores = dict[str, list[list[float]]]


class Outputs:
    """The engines of one search.

    Args:
        start: starts an engine.
        draw: makes the prompts.

    Attributes:
        differing: op -> the plan's implementation, of the ops in which plan and baseline differ.
        errors: kind of engine -> phase -> the median of its errors, in nats; None if one is not
            finite.
        plan: the verdict on the whole plan.
        count: the engines that have answered.
    """

    def __init__(self, start: Start, draw: Draw) -> None:
        self._start, self._draw = start, draw
        self.differing: dict[str, str] = {}
        self.errors: dict[str, dict[str, float | None]] = {}
        self.plan = Verdict()
        self.count = 0
        self._asked: dict[str, Any] = {}
        self._theirs: dict[str, str] = {}
        self._exact: Scores = {}
        self._baseline: Scores = {}

    def search(self) -> tuple[str, list[Culprit]]:
        """Compare plan and baseline, and search for the ops that make the difference.

        Returns:
            The status and the culprits, as `_search.search`.

        Raises:
            EngineError: an engine failed.
            BisectError: nothing can be measured by the baseline.
        """
        with self._start(EXACT, Changes()) as engine:
            self._asked = {"prompts": self._draw(engine.vocabulary), "new_tokens": NEW_TOKENS}
            self._exact = self._scored(engine)
            self._asked["forced"] = self._exact["tokens"]
        with self._start(BASELINE, Changes()) as engine:
            self._theirs = _implementations(engine)
            self._baseline = self._scored(engine)
        self.errors[BASELINE] = self._medians(self._baseline)
        if None in self.errors[BASELINE].values():
            raise BisectError(
                "The baseline's log-probabilities are not finite: nothing can be measured by it. "
                "Choose another one with --against"
            )
        with self._start(PLAN, Changes()) as engine:
            ours = _implementations(engine)
            self.differing = {o: i for o, i in ours.items() if i != self._theirs.get(o, STOCK)}
            scores = self._scored(engine)
            self.errors[PLAN] = self._medians(scores)
            self.plan = self._verdict(scores)
        return search(self.differing, self._trial)

    @property
    def what(self) -> dict[str, str]:
        """Op -> a description of the plan's part of it."""
        return {op: f"{op} ({impl})" for op, impl in self.differing.items()}

    def changes(self, ops: Iterable[str]) -> Changes:
        """The changes of settings that leave these ops to the baseline's implementations."""
        orders: dict[str, Sequence[str]] = {}
        for op in ops:
            label = self._theirs.get(op, STOCK)
            if "|" in label:
                raise BisectError(
                    f"The baseline orders op '{op}' by size ({label}), which cannot be mixed with "
                    "the plan's: choose a policy without rows with --against"
                )
            orders[op] = [label if label == STOCK else f"impl:{label}"]
        return Changes(orders)

    def _trial(self, on: tuple[str, ...]) -> Verdict:
        """An engine with these ops of the plan, and the baseline's instead of the others."""
        left = [op for op in self.differing if op not in on]
        if not left:
            return self.plan
        with self._start(PLAN, self.changes(left)) as engine:
            ops = _implementations(engine)
            for op in left:
                theirs = self._theirs.get(op, STOCK)
                if ops.get(op, theirs) != theirs:
                    raise BisectError(
                        f"Op '{op}' runs with {ops[op]} although its order has only {theirs}: it "
                        "cannot be left to the baseline"
                    )
            return self._verdict(self._scored(engine))

    def _scored(self, engine: Running) -> Scores:
        self.count += 1
        return engine.ask("score", **self._asked)

    def _verdict(self, scores: Scores) -> Verdict:
        times, counts = [], []
        for phase in PHASES:
            own, errors = self._errors(self._baseline, phase), self._errors(scores, phase)
            unit = max(_median(own), FLOOR)
            times.append(_median(errors) / unit)
            far, theirs = (sum(not e <= FAR * unit for e in some) for some in (errors, own))
            counts.append((far, FAR_TIMES * theirs + int(FAR_SHARE * len(own))))
        most = max(times)
        far, allowed = max(counts, key=lambda pair: (pair[0] - pair[1], pair[0]))
        tokens = "1 token is" if far == 1 else f"{far} tokens are"
        why = (
            f"the median error is {most:.2f} times the baseline's (limit {LIMIT}), and {tokens} "
            f"far off (limit {allowed})"
        )
        facts = {"times": _finite(most), "far": far, "far_allowed": allowed}
        return Verdict("wrong" if most > LIMIT or far > allowed else "", why, facts=facts)

    def _errors(self, scores: Scores, phase: str) -> list[float]:
        """The difference of each token's log-probability from the float32 engine's, in nats."""
        pairs = zip(chain(*self._exact[phase]), chain(*scores[phase]), strict=True)
        return [abs(a - b) for a, b in pairs]

    def _medians(self, scores: Scores) -> dict[str, float | None]:
        return {phase: _finite(_median(self._errors(scores, phase))) for phase in PHASES}


def _implementations(engine: Running) -> dict[str, str]:
    """Op -> what runs it, of a worker's report; by size, `vendor.cpu(<=16)|stock`."""
    found = {}
    for op, entry in engine.report.get("ops", {}).items():
        rows = [f"{row['impl']}(<={row['up_to']})" for row in entry.get("rows", ())]
        label = "|".join([*rows, entry["impl"]])
        found[op] = STOCK if label == "foreign" else label  # the same code, without vllm-fl
    return found


def _median(errors: Collection[float]) -> float:
    """Infinite if an error is not finite, 0 if there is none."""
    if not all(map(math.isfinite, errors)):
        return math.inf
    return statistics.median(errors) if errors else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
