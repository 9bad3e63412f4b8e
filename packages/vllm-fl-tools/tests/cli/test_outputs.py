"""The comparison of outputs, with a stand-in for the engines: culprits and numbers of engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_fl.errors import VllmFLError
from vllm_fl_tools.cli._outputs import BASELINE, EXACT, PLAN, Outputs
from vllm_fl_tools.cli._parts import Changes
from vllm_fl_tools.cli._search import Culprit

OPS = ("rms_norm", "silu_and_mul", "rotary_embedding", "attention_backend")
LAYERS = {f"model.layers.{n}.mlp": 1 for n in range(6)}
NOISE = 0.01

Wrong = Callable[[frozenset[tuple[str, str]]], float]
"""(op, layer) of what the plan's own code computes -> the error in multiples of the noise."""


@dataclass
class Machine:
    """Runs engines.

    Args:
        wrong: their error.
        far: at how many of the forced tokens it is a whole nat instead.
        own_far: at how many the baseline's is.
        started: of each engine, its kind and the ops that were left.
    """

    wrong: Wrong
    shared: Mapping[str, int] = field(default_factory=lambda: LAYERS)
    baseline: Mapping[str, Any] = field(default_factory=dict)
    noise: float = NOISE
    far: Wrong = lambda ours: 0
    own_far: int = 0
    tokens: int = 32
    is_stubborn: bool = False
    dies: str = ""
    started: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    running: int = 0

    @contextmanager
    def start(self, kind: str, changes: Changes) -> Iterator[Engine]:
        left = changes.orders
        self.started.append((kind, frozenset(left)))
        if self.dies in left:
            raise VllmFLError(f"The engine without {sorted(left)} failed")
        self.running += 1
        assert self.running == 1, "two engines would share the device's memory"
        try:
            yield Engine(self, kind, left)
        finally:
            self.running -= 1

    def run(self) -> tuple[str, list[Culprit], Outputs]:
        search = Outputs(self.start, lambda vocabulary: [[3, 4, vocabulary]])
        return *search.search(), search


class Engine:
    """A stand-in for an engine."""

    vocabulary = 50

    def __init__(self, machine: Machine, kind: str, left: Collection[str]) -> None:
        self.machine, self.kind, self.left = machine, kind, left
        self.away: set[str] = set()
        theirs = {} if machine.is_stubborn else {op: machine.baseline.get(op) for op in left}
        plan: dict[str, Any] = {op: {"impl": "vendor.acme"} for op in OPS}
        plan |= {op: entry or {"impl": "stock"} for op, entry in theirs.items()}
        self.report = {"ops": plan if kind == PLAN else machine.baseline}

    def ask(self, kind: str, **what: Any) -> dict[str, Any]:
        if kind == "layers":
            return {"layers": dict(self.machine.shared)}
        if kind == "leave":
            if self.machine.dies == kind:
                raise VllmFLError("The engine failed. The end of its log: no stock form")
            self.away = {*what["layers"]}
            return {}
        assert what["prompts"] == [[3, 4, 50]]
        assert (what.get("forced") is None) == (self.kind == EXACT)
        count = self.machine.tokens
        error, far = (0.0, 0) if self.kind == EXACT else (self.machine.noise, self.machine.own_far)
        if self.kind == PLAN:
            names = [name for name in self.machine.shared or {"": 1} if name not in self.away]
            ours = frozenset((op, name) for op in OPS if op not in self.left for name in names)
            error = self.machine.noise * self.machine.wrong(ours)
            far = int(self.machine.far(ours))
        prefill = [[-2.0 + error / 2, -2.0 - error / 2]]
        decode = [[-2.0 - 9 * far] * far + [-1.0 + error] * (count - far)]
        if self.kind == EXACT:
            decode = [[-1.0] * count]
        return {"tokens": [[9] * count], "prefill": prefill, "decode": decode}


def times(factor: float, *pairs: tuple[str, str]) -> Wrong:
    """`factor` if all pairs are the plan's own, else the error of a correct plan."""
    return lambda ours: factor if ours >= {*pairs} else 1.0


def layer(number: int) -> str:
    return f"model.layers.{number}.mlp"


def test_a_correct_plan_takes_three_engines() -> None:
    machine = Machine(lambda ours: 1.4)
    status, found, search = machine.run()
    assert status == "right" and not found
    assert search.plan.facts["times"] == pytest.approx(1.4)
    assert search.errors[BASELINE]["decode"] == pytest.approx(NOISE)
    assert [kind for kind, _ in machine.started] == [EXACT, BASELINE, PLAN]
    assert search.count == 3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("number", [0, 3, 5])
def test_an_op_is_found_with_its_layer(op: str, number: int) -> None:
    machine = Machine(times(1.6, (op, layer(number))))
    status, (culprit,), search = machine.run()
    assert status == "found" and culprit.parts == (op,)
    assert culprit.verdict.facts["layers"] == [[layer(number)]]
    assert culprit.verdict.facts["times"] == pytest.approx(1.6)
    assert search.changes(culprit.parts).orders == {op: ["stock"]}
    assert len(machine.started) <= 8, "the layers take no engine of their own"


def test_an_op_that_is_wrong_everywhere_has_all_its_layers() -> None:
    machine = Machine(lambda ours: 3.0 if any(op == "rms_norm" for op, _ in ours) else 1.0)
    _, (culprit,), _ = machine.run()
    assert sorted(culprit.verdict.facts["layers"]) == [[name] for name in LAYERS]


@pytest.mark.parametrize(("own", "far", "is_named"), [(2, 6, False), (2, 7, True), (0, 1, True)])
def test_chance_may_send_tokens_to_other_experts(own: int, far: int, is_named: bool) -> None:
    wrong = ("rms_norm", layer(2))
    machine = Machine(times(1.0), own_far=own, far=lambda ours: far if wrong in ours else own)
    status, _, search = machine.run()
    assert (status == "found") == is_named
    facts = search.plan.facts
    assert (facts["far"], facts["far_allowed"]) == (far, 3 * own)


@pytest.mark.parametrize(("far", "status"), [(5, "right"), (6, "elsewhere")])
def test_a_share_of_the_tokens_may_be_far_off(far: int, status: str) -> None:
    assert Machine(times(1.0), tokens=256, far=lambda ours: far).run()[0] == status


def test_ops_that_are_wrong_only_together_have_no_layers() -> None:
    pairs = (("rms_norm", layer(1)), ("rotary_embedding", layer(1)))
    _, (culprit,), _ = Machine(times(2.0, *pairs)).run()
    assert {*culprit.parts} == {"rms_norm", "rotary_embedding"}
    assert "layers" not in culprit.verdict.facts


def test_ops_in_which_the_two_agree_are_not_tried() -> None:
    same = {op: {"impl": "vendor.acme"} for op in OPS if op != "rms_norm"}
    machine = Machine(times(2.0, ("rms_norm", layer(0))), baseline=same)
    _, (culprit,), search = machine.run()
    assert culprit.parts == ("rms_norm",) and search.differing == {"rms_norm": "vendor.acme"}
    assert [left for kind, left in machine.started if kind == PLAN] == [set(), {"rms_norm"}]


@pytest.mark.parametrize(
    ("machine", "remark"),
    [
        (Machine(lambda ours: 2.0 if "rms_norm" in str(ours) else 1.0, shared={}), "no layer"),
        (Machine(times(2.0, ("rms_norm", layer(2))), dies="leave"), "no stock form"),
    ],
)
def test_an_op_is_found_without_layers(machine: Machine, remark: str) -> None:
    _, (culprit,), _ = machine.run()
    assert culprit.parts == ("rms_norm",) and culprit.verdict.facts["layers"] is None
    assert remark in culprit.verdict.facts["remark"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_wrong(value: float) -> None:
    _, (culprit,), _ = Machine(times(value, ("rms_norm", layer(2)))).run()
    facts = culprit.verdict.facts
    assert facts["times"] is None and facts["layers"] == [[layer(2)]]


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        (Machine(lambda ours: 1.0, noise=math.nan), "baseline's log-probabilities are not finite"),
        (Machine(times(2.0, ("rms_norm", layer(2))), dies="attention_backend"), "without"),
        (Machine(lambda ours: 2.0, is_stubborn=True), "although its order has only stock"),
        (
            Machine(
                lambda ours: 2.0,
                baseline={
                    "silu_and_mul": {
                        "impl": "stock",
                        "rows": [{"up_to": 16, "impl": "vendor.cpu", "reason": ""}],
                    }
                },
            ),
            r"orders op 'silu_and_mul' by size \(vendor.cpu",
        ),
    ],
)
def test_errors(machine: Machine, problem: str) -> None:
    with pytest.raises(VllmFLError, match=problem):
        machine.run()
