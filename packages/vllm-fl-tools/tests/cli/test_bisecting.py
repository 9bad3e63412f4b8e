"""A bisection, with a stand-in for the engines: what it names and asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_fl.errors import VllmFLError
from vllm_fl_tools.cli._bisecting import BASELINE, EXACT, PLAN, Bisection, Finding

OPS = ("rms_norm", "silu_and_mul", "rotary_embedding", "attention_backend")
LAYERS = {f"model.layers.{n}.mlp": 1 for n in range(6)}
NOISE = 0.01

Wrong = Callable[[frozenset[tuple[str, str]]], float]
"""(op, layer) of what the plan's own code computes -> the error in multiples of the noise."""


@dataclass
class Machine:
    """Where engines run.

    Args:
        wrong: what their error is.
        far: at how many of the 32 forced tokens it is a whole nat instead.
        own_far: at how many the baseline's is.
        started: of each engine, its kind and the ops that were left.
        failing: whether an engine with these ops left fails.
    """

    wrong: Wrong
    shared: Mapping[str, int] = field(default_factory=lambda: LAYERS)
    baseline: Mapping[str, Any] = field(default_factory=dict)
    noise: float = NOISE
    far: Wrong = lambda ours: 0
    own_far: int = 0
    started: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    failing: Callable[[frozenset[str]], bool] = lambda left: False
    scored: int = 0
    running: int = 0

    @contextmanager
    def start(self, kind: str, left: Mapping[str, str]) -> Iterator[Engine]:
        self.started.append((kind, frozenset(left)))
        if self.failing(frozenset(left)):
            raise VllmFLError(f"The engine without {sorted(left)} failed")
        self.running += 1
        assert self.running == 1, "two engines would share the device's memory"
        try:
            yield Engine(self, kind, left)
        finally:
            self.running -= 1

    def run(self) -> Finding:
        return Bisection(self.start, lambda vocabulary: [[3, 4, vocabulary]]).run()


class Engine:
    """A stand-in for an engine."""

    vocabulary = 50

    def __init__(self, machine: Machine, kind: str, left: Mapping[str, str]) -> None:
        self.machine, self.kind, self.left = machine, kind, left
        self.away: set[str] = set()
        ours: Mapping[str, Any] = {op: {"impl": "vendor.acme"} for op in OPS}
        theirs = {op: {"impl": token.removeprefix("impl:")} for op, token in left.items()}
        plan = {**ours, **theirs} if kind == PLAN else machine.baseline
        self.report = {"ops": plan}

    def ask(self, kind: str, **what: Any) -> dict[str, Any]:
        if kind == "layers":
            return {"layers": dict(self.machine.shared)}
        if kind == "leave":
            assert {*what["layers"]} <= {*self.machine.shared}
            self.away = {*what["layers"]}
            return {}
        self.machine.scored += 1
        assert what["prompts"] == [[3, 4, 50]]
        assert (what["forced"] is None) == (self.kind == EXACT)
        tokens = what["forced"] or [[9] * what["new_tokens"]]
        error, far = (0.0, 0) if self.kind == EXACT else (self.machine.noise, self.machine.own_far)
        if self.kind == PLAN:
            names = self.machine.shared or {"": 1}
            ours = {
                (op, name)
                for op in OPS
                if op not in self.left
                for name in names
                if name not in self.away
            }
            error = self.machine.noise * self.machine.wrong(frozenset(ours))
            far = int(self.machine.far(frozenset(ours)))
        decode = [[-2.0] * far + [-1.0 + error] * (what["new_tokens"] - far)]
        return {
            "tokens": tokens,
            "prefill": [[-2.0 + error / 2, -2.0 - error / 2]],
            "decode": decode,
        }


def times(factor: float, *pairs: tuple[str, str]) -> Wrong:
    """`factor` where all pairs are the plan's own, else what a right plan has."""
    return lambda ours: factor if ours >= {*pairs} else 1.0


def layer(number: int) -> str:
    return f"model.layers.{number}.mlp"


def test_a_right_plan_is_noise_and_takes_three_engines() -> None:
    machine = Machine(lambda ours: 1.4)
    found = machine.run()
    assert not found.culprits and not found.elsewhere
    assert found.excess.times == pytest.approx(1.4)
    assert found.errors[BASELINE]["decode"] == pytest.approx(NOISE)
    assert [kind for kind, _ in machine.started] == [EXACT, BASELINE, PLAN]
    assert found.engines == 3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("number", [0, 3, 5])
def test_an_op_is_named_with_the_layer_in_which_it_is_wrong(op: str, number: int) -> None:
    machine = Machine(times(1.6, (op, layer(number))))
    found = machine.run()
    (culprit,) = found.culprits
    assert culprit.ops == {op: "vendor.acme"} and culprit.layers == ((layer(number),),)
    assert culprit.excess.times == pytest.approx(1.6) and not found.elsewhere
    assert len(machine.started) <= 8, "the layers take no engine of their own"


def test_an_op_that_is_wrong_everywhere_has_all_its_layers() -> None:
    machine = Machine(lambda ours: 3.0 if any(op == "rms_norm" for op, _ in ours) else 1.0)
    (culprit,) = machine.run().culprits
    assert culprit.layers is not None
    assert sorted(culprit.layers) == [(name,) for name in LAYERS]


@pytest.mark.parametrize(("own", "far", "is_named"), [(2, 6, False), (2, 7, True), (0, 1, True)])
def test_tokens_whose_experts_are_other_ones_may_be_as_many_as_chance_makes(
    own: int, far: int, is_named: bool
) -> None:
    """The root mean square of the errors would be 1.7 times the baseline's in the first case."""
    wrong = ("rms_norm", layer(2))
    found = Machine(times(1.0), own_far=own, far=lambda ours: far if wrong in ours else own).run()
    assert bool(found.culprits) == is_named and not found.elsewhere
    assert (found.excess.far, found.excess.allowed) == (far, 3 * own)


def test_a_share_of_the_tokens_may_be_far_off_whatever_the_baseline_s_are() -> None:
    """Of 256 forced tokens, five; the stand-in's one prompt has too few for any."""
    score = {"tokens": [[9] * 256], "prefill": [[-2.0]]}

    def found(far: int) -> Finding:
        def line(kind: str, error: float, far: int) -> dict[str, Any]:
            decode = [[-5.0] * far + [-1.0 + error] * (256 - far)]
            return {"kind": kind, "left": {}, "ops": {}, "score": {**score, "decode": decode}}

        answers = [line(EXACT, 0.0, 0), line(BASELINE, NOISE, 0), line(PLAN, NOISE, far)]
        bisection = Bisection(Machine(times(1.0)).start, lambda vocabulary: [[3, 4, vocabulary]])
        bisection._answers |= {(each["kind"], frozenset()): each for each in answers}
        return bisection.run()

    assert not found(5).elsewhere and found(6).elsewhere
    assert found(6).excess.allowed == 5


def test_ops_that_are_wrong_only_together_are_named_together_without_layers() -> None:
    pairs = (("rms_norm", layer(1)), ("rotary_embedding", layer(1)))
    (culprit,) = Machine(times(2.0, *pairs)).run().culprits
    assert {*culprit.ops} == {"rms_norm", "rotary_embedding"} and culprit.layers is None


def test_what_is_no_op_is_not_blamed_on_one() -> None:
    found = Machine(lambda ours: 5.0).run()
    assert found.elsewhere and not found.culprits and found.excess.times == pytest.approx(5.0)


def test_ops_in_which_the_two_agree_are_left_alone() -> None:
    same = {op: {"impl": "vendor.acme"} for op in OPS if op != "rms_norm"}
    machine = Machine(times(2.0, ("rms_norm", layer(0))), baseline=same)
    found = machine.run()
    (culprit,) = found.culprits
    assert {*culprit.ops} == {"rms_norm"} and culprit.layers == ((layer(0),),)
    assert [left for kind, left in machine.started if kind == PLAN] == [set(), {"rms_norm"}]
    assert found.ops == {"rms_norm": "vendor.acme"}


def test_calls_that_no_layer_makes_are_told_as_such() -> None:
    machine = Machine(lambda ours: 2.0, shared={})
    machine.wrong = lambda ours: 2.0 if any(op == "rms_norm" for op, _ in ours) else 1.0
    (culprit,) = machine.run().culprits
    assert culprit.layers is None and "no layer" in culprit.remark


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_wrong(value: float) -> None:
    (culprit,) = Machine(times(value, ("rms_norm", layer(2)))).run().culprits
    assert culprit.excess.times == math.inf and culprit.layers == ((layer(2),),)


def test_a_baseline_that_is_not_finite_measures_nothing() -> None:
    with pytest.raises(VllmFLError, match="baseline's log-probabilities are not finite"):
        Machine(lambda ours: 1.0, noise=math.nan).run()


def test_an_engine_that_fails_ends_it() -> None:
    wrong = times(2.0, ("rms_norm", layer(2)))
    with pytest.raises(VllmFLError, match="without"):
        Machine(wrong, failing=lambda left: "attention_backend" in left).run()


def test_an_op_is_named_though_its_layers_cannot_be_told_apart() -> None:
    machine = Machine(times(2.0, ("rms_norm", layer(2))))

    class Dying(Engine):
        def ask(self, kind: str, **what: Any) -> dict[str, Any]:
            if kind == "leave":
                raise VllmFLError("The engine failed. The end of its log: no stock form")
            return super().ask(kind, **what)

    @contextmanager
    def start(kind: str, left: Mapping[str, str]) -> Iterator[Engine]:
        with machine.start(kind, left):
            yield Dying(machine, kind, left)

    found = Bisection(start, lambda vocabulary: [[3, 4, 50]]).run()
    (culprit,) = found.culprits
    assert {*culprit.ops} == {"rms_norm"} and culprit.layers is None
    assert "no stock form" in culprit.remark


def test_an_op_that_does_not_let_itself_be_left_is_an_error() -> None:
    machine = Machine(lambda ours: 2.0)

    @contextmanager
    def start(kind: str, left: Mapping[str, str]) -> Iterator[Engine]:
        with machine.start(kind, left) as engine:
            engine.report = {"ops": {op: {"impl": "vendor.acme"} for op in OPS}}
            yield engine if kind == PLAN else Engine(machine, kind, left)

    with pytest.raises(VllmFLError, match="although its list names stock alone"):
        Bisection(start, lambda vocabulary: [[3, 4, 50]]).run()


def test_a_baseline_with_orders_by_size_is_refused() -> None:
    rows = [{"up_to": 16, "impl": "vendor.cpu", "reason": ""}]
    baseline = {"silu_and_mul": {"impl": "stock", "rows": rows}}
    with pytest.raises(VllmFLError, match=r"orders op 'silu_and_mul' by size \(vendor.cpu"):
        Machine(lambda ours: 2.0, baseline=baseline).run()
