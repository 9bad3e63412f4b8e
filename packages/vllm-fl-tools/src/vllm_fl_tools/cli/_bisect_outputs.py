"""Finds the operator that makes a plan less exact than a baseline.

All engines get the same tokens, and report the log-probability of each token. The tokens are the
answers of a float32 engine. Errors are the differences from the float32 engine. A correct plan also
has errors, because it computes in the model's dtype. A baseline in the same dtype has comparable
errors.

If a correct plan rounds more often, its errors are larger by one factor at all tokens. The errors
of the plan are therefore divided by that factor. Then the numbers of errors above every threshold
are compared. Low thresholds find an error of all tokens, and high thresholds find an error of a few
tokens.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from vllm_fl.errors import VllmFLError

from ..engine.tuning_table import STOCK_NAME
from ._bisect_search import Culprit, Verdict, search
from ._engines import EngineProcess
from ._parts import NAME, Changes, Parts

EXACT, BASELINE, PLANNED = "float32", "baseline", "plan"

PHASES = ("prefill", "decode")

LIMIT = 1.5
"""Maximum ratio of a correct plan's median error to the baseline's.

A plan that rounds twice for each rounding of the baseline has about sqrt(2) = 1.41 times the
baseline's error, and is correct. docs/measurements/verbs.md has the measurements of all limits.
"""

MARGIN = 1.25
"""Factor by which a correct plan's errors may exceed the baseline's, in size and in number.

In a mixture of experts, more rounding changes the experts of more tokens.
"""

CHANCE = 3
"""Additional margin for the number of errors, in standard deviations."""

FLOOR = 1e-4
"""Minimum error of a baseline, because a float32 baseline has no error. Float32 sums in another
order differ by less.
"""

PROMPTS, NEW_TOKENS = 16, 32
"""Number of prompts that the limits need, and number of forced tokens after each prompt."""


class BisectError(VllmFLError):
    """The plan and the baseline cannot be compared."""

    code = "FL603"


StartEngine = Callable[[str, Changes], AbstractContextManager[EngineProcess]]
"""(kind, changes of user settings) -> the engine."""

Draw = Callable[[int], list[list[int]]]
"""Size of the vocabulary -> the prompts, as token ids."""

Scores = dict[str, list[list[float]]]


class Outputs:
    """The engines of one search.

    Args:
        start: starts an engine.
        draw: makes the prompts.
        parts: the parts of the plan's engine.

    Attributes:
        differing: op -> implementation of the plan, for ops with another implementation in the
            baseline.
        what: part -> description, for these ops and for operators replaced outside the plan.
        errors: kind of engine -> phase -> median error, in nats; None if an error is not finite.
        plan: the verdict on the whole plan.
        count: number of engines that have answered.
    """

    def __init__(self, start: StartEngine, draw: Draw, parts: Parts) -> None:
        self._start, self._draw, self._parts = start, draw, parts
        self.differing: dict[str, str] = {}
        self.errors: dict[str, dict[str, float | None]] = {}
        self.plan = Verdict()
        self.count = 0
        self._asked: dict[str, Any] = {}
        self._theirs: dict[str, str] = {}
        self._exact: Scores = {}
        self._baseline: Scores = {}

    def search(self) -> tuple[str, list[Culprit]]:
        """Compare plan and baseline, and search for the ops that cause the difference.

        Returns:
            The result of `_search.search`.

        Raises:
            EngineError: an engine failed.
            BisectError: the baseline cannot be used for comparison.
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
                "The baseline's log-probabilities are not finite, so it cannot be compared with. "
                "Choose another baseline with --against"
            )
        with self._start(PLANNED, Changes()) as engine:
            ours = _implementations(engine)
            self.differing = {o: i for o, i in ours.items() if i != self._theirs.get(o, STOCK_NAME)}
            scores = self._scored(engine)
            self.errors[PLANNED] = self._medians(scores)
            self.plan = self._verdict(scores)
        self.what = {op: f"{op} ({impl})" for op, impl in self.differing.items()}
        if self.plan.how:
            self.what |= {key: p.what for key, p in self._parts.by_key.items() if p.kind == NAME}
        return search(self.what, self._trial, {})

    def changes(self, parts: Collection[str]) -> Changes:
        """Return the settings that give these parts the baseline's implementations."""
        changes = self._parts.changes({*parts} - self.differing.keys())
        for op in (part for part in parts if part in self.differing):
            label = self._theirs.get(op, STOCK_NAME)
            if "|" in label:
                raise BisectError(
                    f"The baseline chooses op '{op}' by size ({label}), which cannot be mixed with "
                    "the plan: with --against, choose a baseline without sizes"
                )
            changes.orders[op] = [label if label == STOCK_NAME else f"impl:{label}"]
        return changes

    def _trial(self, on: tuple[str, ...]) -> Verdict:
        """Judge an engine with these parts of the plan, and the others from the baseline."""
        left = [op for op in self.what if op not in on]
        if not left:
            return self.plan
        with self._start(PLANNED, self.changes(left)) as engine:
            ops = _implementations(engine)
            for op in left:
                theirs = self._theirs.get(op, STOCK_NAME)
                if ops.get(op, theirs) != theirs:
                    raise BisectError(
                        f"Op '{op}' runs with {ops[op]} although its order has only {theirs}: the "
                        "baseline's implementation cannot be used for it"
                    )
            return self._verdict(self._scored(engine))

    def _scored(self, engine: EngineProcess) -> Scores:
        self.count += 1
        return engine.ask("score", **self._asked)

    def _verdict(self, scores: Scores) -> Verdict:
        pairs = [(self._errors(self._baseline, p), self._errors(scores, p)) for p in PHASES]
        most = max(_median(errors) / max(_median(own), FLOOR) for own, errors in pairs)
        _, above, far, allowed = max(excess(*pair) for pair in pairs)
        why = (
            f"the median error is {most:.2f} times as large as in the baseline, and {far} errors "
            f"are above {above:.2g} nats (limit {allowed})"
        )
        if scores == self._baseline:
            why = "plan and baseline return equal log-probabilities"
        facts = {"times": _finite(most), "above": above, "far": far, "far_allowed": allowed}
        return Verdict("wrong" if far > allowed or most == math.inf else "", why, facts=facts)

    def _errors(self, scores: Scores, phase: str) -> list[float]:
        """Return each token's difference in log-probability from the float32 engine, in nats."""
        pairs = zip(chain(*self._exact[phase]), chain(*scores[phase]), strict=True)
        return [abs(a - b) for a, b in pairs]

    def _medians(self, scores: Scores) -> dict[str, float | None]:
        return {phase: _finite(_median(self._errors(scores, phase))) for phase in PHASES}


def excess(base: Collection[float], plan: Collection[float]) -> tuple[float, float, int, int]:
    """Find the threshold above which a plan has the most errors, relative to the limit.

    The limit follows from a rule: if two independent counts have the same mean, the variance of
    their difference is about their sum.

    Args:
        base, plan: the errors of both at the same tokens.

    Returns:
        (number / limit, threshold, number of the plan's errors above the threshold, limit of that
        number).
    """
    own = sorted(max(error, FLOOR) for error in base)
    errors = sorted(error if math.isfinite(error) else math.inf for error in plan)
    scale = min(max(_median(errors) / (_median(own) or FLOOR), MARGIN), LIMIT)

    def at(threshold: float) -> tuple[float, float, int, int]:
        mean = MARGIN * (len(own) - bisect_right(own, threshold))
        limit = int(mean + CHANCE * (CHANCE / 2 + math.sqrt(2 * mean + CHANCE**2 / 4)))
        far = len(errors) - bisect_right(errors, scale * threshold)
        return far / limit, scale * threshold, far, limit

    return max(map(at, own[len(own) // 2 :] or (FLOOR,)))


def _implementations(engine: EngineProcess) -> dict[str, str]:
    """Return op -> implementation from a worker report, or `vendor.cpu(<=16)|stock` by size."""
    found = {}
    for op, entry in engine.report.get("ops", {}).items():
        rows = [f"{row['impl']}(<={row['up_to']})" for row in entry.get("rows", ())]
        label = "|".join([*rows, entry["impl"]])
        found[op] = STOCK_NAME if label == "foreign" else label  # the same code without vllm-fl
    return found


def _median(errors: Collection[float]) -> float:
    """Return the median: infinite if an error is not finite, 0 without errors."""
    if not all(map(math.isfinite, errors)):
        return math.inf
    return statistics.median(errors) if errors else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
