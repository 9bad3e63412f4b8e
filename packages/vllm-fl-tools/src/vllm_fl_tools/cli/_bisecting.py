"""What `vllm-fl bisect` asks engines, and what follows from their answers.

Every engine is told the same tokens, those that a float32 engine answers with, and says how likely
it holds each to be. The differences from what the float32 engine says are an engine's errors. A
right plan has them, too, since it computes in the model's dtype: what it is measured by are those
of the baseline, which has the same dtype.

Two measures are taken, since no single one sees all that is wrong and leaves all that is right
alone. The median is the same whether or not the experts of a few tokens are other ones, which in a
mixture of experts one rounding can bring about; but an error in fewer than half of the tokens does
not move it. That is what the tokens that are far off are counted for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol

from vllm_fl.errors import VllmFLError
from vllm_fl.text import quote

from ._search import culprits
from ._show import say

__all__ = [
    "BASELINE",
    "EXACT",
    "LIMIT",
    "PLAN",
    "PROMPTS",
    "Bisection",
    "Culprit",
    "Excess",
    "Finding",
    "Start",
]

EXACT, BASELINE, PLAN = "float32", "baseline", "plan"
"""The kinds of engines."""

PHASES = ("prefill", "decode")

LIMIT = 1.5
"""How many times the baseline's median error a right plan's may be.

A plan that rounds twice wherever the baseline rounds once has about sqrt(2) = 1.41 times its error,
and is right. What was measured is in docs/measurements/verbs.md, for this and for the limits below.
"""

FAR = 10
"""How many times the baseline's median error an error is that is called far off.

Rounding alone reached that at no token of any model without experts.
"""

FAR_TIMES, FAR_SHARE = 3, 0.02
"""A right plan's tokens that are far off may be this many times the baseline's, and this share of
all tokens besides. Which tokens get other experts is chance: one right plan had up to 2.3
times as many as the baseline. The share is for baselines that have few, or none."""

FLOOR = 1e-4
"""The least median that the baseline's is taken for: sums of float32 in another order differ by
less than that, and a baseline in float32 has no error of its own."""

PROMPTS, NEW_TOKENS = 16, 32
"""How many prompts the limits hold for, and how many tokens are forced after each."""

STOCK = "stock"

NOTHING: Mapping[str, str] = MappingProxyType({})


class BisectError(VllmFLError):
    """The plan and the baseline cannot be compared."""

    code = "FL603"


class Running(Protocol):
    """An engine that runs; see `cli._engines`."""

    report: dict[str, Any]
    vocabulary: int

    def ask(self, kind: str, **what: Any) -> dict[str, Any]: ...


Start = Callable[[str, Mapping[str, str]], AbstractContextManager[Running]]
"""(kind, ops of the plan that are left -> the token of what runs instead) -> the engine."""

Draw = Callable[[int], list[list[int]]]
"""The model's vocabulary -> the prompts, as token ids."""


@dataclass(frozen=True)
class Excess:
    """How an engine's errors compare with the baseline's.

    Args:
        times: the median as a multiple of the baseline's, in the worse phase; infinite where an
            error is not finite.
        far: tokens that are far off, in the phase in which they are most above what is allowed.
        allowed: how many may be.
    """

    times: float
    far: int
    allowed: int

    @property
    def is_wrong(self) -> bool:
        """Whether it is more than a right plan has."""
        return self.times > LIMIT or self.far > self.allowed


@dataclass(frozen=True)
class Culprit:
    """Ops that are wrong: one by itself, or several that are wrong only together.

    Args:
        ops: op -> the implementation.
        excess: what an engine has with these ops alone.
        layers: of a single op, sets of its layers that are wrong; None where it was not looked for.
            An empty set means calls that no layer makes.
        shared: layer -> how many places of the model share it.
        remark: why there are no layers, or nothing.
    """

    ops: Mapping[str, str]
    excess: Excess
    layers: tuple[tuple[str, ...], ...] | None = None
    shared: Mapping[str, int] = field(default_factory=dict)
    remark: str = ""


@dataclass(frozen=True)
class Finding:
    """What a bisection found.

    Args:
        errors: kind of engine -> phase -> the median of its errors, in nats.
        excess: the plan's.
        ops: op -> the plan's implementation, of the ops in which plan and baseline differ.
        culprits: none where the difference is noise.
        elsewhere: whether the plan is wrong with every op left that the two differ in.
        engines: how many were started, by this run and by those that it goes on from.
    """

    errors: Mapping[str, Mapping[str, float]]
    excess: Excess
    ops: Mapping[str, str]
    culprits: tuple[Culprit, ...]
    elsewhere: bool
    engines: int


class Bisection:
    """The engines that one question takes, and what each answered.

    Args:
        start: starts an engine.
        draw: gives the prompts.
    """

    def __init__(self, start: Start, draw: Draw) -> None:
        self._start, self._draw = start, draw
        self._answers: dict[tuple[str, frozenset[str]], dict[str, Any]] = {}

    @property
    def engines(self) -> int:
        """How many have answered."""
        return len(self._answers)

    def run(self) -> Finding:
        """Compare plan and baseline, and look for who makes the difference.

        Raises:
            EngineError: an engine failed.
            BisectError: the baseline cannot be measured by.
        """
        baseline = self._answer(BASELINE)
        own = self._medians(baseline)
        if not all(map(math.isfinite, own.values())):
            raise BisectError(
                "The baseline's log-probabilities are not finite: nothing can be measured by it. "
                "Name another one with --against"
            )
        ours = self._answer(PLAN)
        differing = self._differing(ours["ops"])
        found = culprits(differing, lambda ops: self._excess(self._with(differing, ops)).is_wrong)
        named = [self._culprit(differing, ops) for ops in found if ops]
        return Finding(
            {BASELINE: own, PLAN: self._medians(ours)},
            self._excess(ours),
            differing,
            tuple(named),
            () in found,
            self.engines,
        )

    def _with(self, differing: Iterable[str], ops: Sequence[str]) -> dict[str, Any]:
        """The answer of an engine with the plan's `ops`, and the baseline's in place of others."""
        theirs = self._answer(BASELINE)["ops"]
        left = {op: _token(op, theirs.get(op, STOCK)) for op in differing if op not in ops}
        return self._answer(PLAN, left)

    def _differing(self, ops: Mapping[str, str]) -> dict[str, str]:
        """Those of `ops` (op -> what it runs with) that the baseline runs with something else."""
        theirs = self._answer(BASELINE)["ops"]
        return {op: label for op, label in ops.items() if label != theirs.get(op, STOCK)}

    def _answer(self, kind: str, left: Mapping[str, str] = NOTHING) -> dict[str, Any]:
        """What an engine answers, or has answered before."""
        key = _key(kind, left)
        if key in self._answers:
            return self._answers[key]
        exact = None if kind == EXACT else self._answer(EXACT)
        with self._start(kind, left) as engine:
            prompts = self._draw(engine.vocabulary) if exact is None else exact["prompts"]
            forced = None if exact is None else exact["score"]["tokens"]
            asked = {"prompts": prompts, "new_tokens": NEW_TOKENS, "forced": forced}
            ops = {op: _label(told) for op, told in engine.report.get("ops", {}).items()}
            line: dict[str, Any] = {"kind": kind, "left": dict(left), "ops": ops}
            line["score"] = engine.ask("score", **asked)
            if exact is None:
                line["prompts"] = prompts
            if kind == PLAN:
                differing = self._differing(ops)
                for op in left:
                    if op in differing:
                        raise BisectError(
                            f"Op '{op}' runs with {ops[op]} although its list names {left[op]} "
                            "alone: it cannot be left to the baseline"
                        )
                if len(differing) == 1 and self._excess(line).is_wrong:
                    (only,) = differing
                    line |= self._layers(engine, only, asked)
        self._answers[key] = line
        return line

    def _layers(self, engine: Running, op: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Which layers of its one op make an engine wrong, asked of it while it runs."""
        try:
            shared: dict[str, int] = engine.ask("layers", op=op)["layers"]
            if not shared:
                return {"layers": None, "remark": "no layer of the model runs it"}

            def is_wrong(names: tuple[str, ...]) -> bool:
                if len(names) == len(shared):
                    return True
                say(f"with op {op} in {len(names)} of {len(shared)} layers", error=True)
                engine.ask("leave", op=op, layers=[name for name in shared if name not in names])
                return self._excess({"score": engine.ask("score", **asked)}).is_wrong

            return {"layers": culprits(shared, is_wrong), "shared": shared, "remark": ""}
        except VllmFLError as error:  # the op is named all the same
            return {"layers": None, "remark": f"its layers could not be told apart: {quote(error)}"}

    def _culprit(self, differing: Mapping[str, str], ops: Sequence[str]) -> Culprit:
        line = self._with(differing, ops)
        layers = line.get("layers")
        return Culprit(
            {op: differing[op] for op in ops},
            self._excess(line),
            None if layers is None else tuple(map(tuple, layers)),
            line.get("shared", {}),
            line.get("remark", ""),
        )

    def _errors(self, line: Mapping[str, Any], phase: str) -> list[float]:
        """How far each token's log-probability is from the float32 engine's, in nats."""
        exact, other = self._answer(EXACT)["score"][phase], line["score"][phase]
        return [abs(a - b) for a, b in zip(chain(*exact), chain(*other), strict=True)]

    def _medians(self, line: Mapping[str, Any]) -> dict[str, float]:
        return {phase: _median(self._errors(line, phase)) for phase in PHASES}

    def _excess(self, line: Mapping[str, Any]) -> Excess:
        times, counts = [], []
        for phase in PHASES:
            own, errors = self._errors(self._answer(BASELINE), phase), self._errors(line, phase)
            unit = max(_median(own), FLOOR)
            times.append(_median(errors) / unit)
            far, theirs = (sum(not e <= FAR * unit for e in some) for some in (errors, own))
            counts.append((far, FAR_TIMES * theirs + int(FAR_SHARE * len(own))))
        return Excess(max(times), *max(counts, key=lambda pair: (pair[0] - pair[1], pair[0])))


def _key(kind: str, left: Mapping[str, str]) -> tuple[str, frozenset[str]]:
    return kind, frozenset(left)


def _label(told: Mapping[str, Any]) -> str:
    """What an op runs with, of a worker's report; by size, as `vendor.cpu(<=16)|stock`."""
    rows = [f"{row['impl']}(<={row['up_to']})" for row in told.get("rows", ())]
    label = "|".join([*rows, told["impl"]])
    return STOCK if label == "foreign" else label  # what runs without vllm-fl, either way


def _token(op: str, label: str) -> str:
    """What asks for an implementation in an op's list."""
    if "|" in label:
        raise BisectError(
            f"The baseline orders op '{op}' by size ({label}), which cannot be mixed with the "
            "plan's: name a policy without rows with --against"
        )
    return label if label == STOCK else f"impl:{label}"


def _median(errors: Sequence[float]) -> float:
    """Infinite where one of them is not finite, nothing where there is none."""
    if not all(map(math.isfinite, errors)):
        return math.inf
    return statistics.median(errors) if errors else 0.0
