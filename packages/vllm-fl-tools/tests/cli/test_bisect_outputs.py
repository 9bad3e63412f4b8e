"""The comparison of outputs, with a stand-in for the engines: culprits and numbers of engines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.errors import VllmFLError
from vllm_fl_tools.cli._bisect_outputs import BASELINE, EXACT, FLOOR, PLANNED, Outputs, excess
from vllm_fl_tools.cli._bisect_search import Culprit
from vllm_fl_tools.cli._parts import Changes, Parts

OPS = ("rms_norm", "silu_and_mul", "rotary_embedding", "attention_backend")
NOISE = 0.01
RECORDED = json.loads(Path(__file__).with_name("errors.json").read_text())
"""Model -> plan -> phase -> the number of errors of about FLOOR * 2 ** (n / 8) nats, for each n.

SmolLM2-135M on a CPU, bfloat16, with bisect's prompts. Each plan but stock replaces three ops. The
mixture of experts is a tiny Mixtral with 1520 random tokens, computed by transformers.
"""
REPLACED = ("acme_off mm", "acme_off zeros")
PART = {"kind": "name", "of": "acme", "setting": "acme_off"}
PARTS = Parts(
    {
        "plugins": {"acme": {"release": "acme 1.0", "module": False}},
        "lists": {"acme_off": {"variable": "ACME_OFF", "names": [], "allows": False}},
        "parts": [PART | {"name": name, "what": f"operator {name}"} for name in ("mm", "zeros")],
    }
)

Wrong = Callable[[frozenset[str]], float]
"""The plan's ops and operators in use -> the error in multiples of the noise."""


@dataclass
class Machine:
    """Runs engines with this error; it is one nat at `far` of the forced tokens (baseline:
    `own_far`). `started`: each engine's kind and excluded ops."""

    wrong: Wrong
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
        names = changes.values.get("ACME_OFF", ("", []))[1]
        left = [*changes.orders, *(f"acme_off {name}" for name in names)]
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
        search = Outputs(self.start, lambda vocabulary: [[3, 4, vocabulary]], PARTS)
        return *search.search(), search


class Engine:
    vocabulary = 50

    def __init__(self, machine: Machine, kind: str, left: Collection[str]) -> None:
        self.machine, self.kind, self.left = machine, kind, left
        ops = [] if machine.is_stubborn else [op for op in OPS if op in left]
        theirs = {op: machine.baseline.get(op) for op in ops}
        plan: dict[str, Any] = {op: {"impl": "vendor.acme"} for op in OPS}
        plan |= {op: entry or {"impl": "stock"} for op, entry in theirs.items()}
        self.report = {"ops": plan if kind == PLANNED else machine.baseline}

    def ask(self, kind: str, **what: Any) -> dict[str, Any]:
        assert what["prompts"] == [[3, 4, 50]]
        assert (what.get("forced") is None) == (self.kind == EXACT)
        count = self.machine.tokens
        error, far = (0.0, 0) if self.kind == EXACT else (self.machine.noise, self.machine.own_far)
        if self.kind == PLANNED:
            ours = frozenset(part for part in (*OPS, *REPLACED) if part not in self.left)
            error = self.machine.noise * self.machine.wrong(ours)
            far = int(self.machine.far(ours))
        prefill = [[-2.0 + error / 2, -2.0 - error / 2]]
        decode = [[-2.0] * far + [-1.0 + error] * (count - far)]
        if self.kind == EXACT:
            decode = [[-1.0] * count]
        return {"tokens": [[9] * count], "prefill": prefill, "decode": decode}


def times(factor: float, *ops: str) -> Wrong:
    """`factor` if the plan replaces all these ops, else the error of a correct plan."""
    return lambda ours: factor if ours >= {*ops} else 1.0


def test_a_correct_plan_takes_three_engines() -> None:
    machine = Machine(lambda ours: 1.2)
    status, found, search = machine.run()
    assert status == "right" and not found
    assert search.plan.facts["times"] == pytest.approx(1.2)
    assert search.errors[BASELINE]["decode"] == pytest.approx(NOISE)
    assert [kind for kind, _ in machine.started] == [EXACT, BASELINE, PLANNED]
    assert search.count == 3


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_found(op: str) -> None:
    machine = Machine(times(1.6, op))
    status, (culprit,), search = machine.run()
    assert status == "found" and culprit.parts == (op,)
    assert culprit.verdict.facts["times"] == pytest.approx(1.6)
    assert search.changes(culprit.parts).orders == {op: ["stock"]}
    assert len(machine.started) <= 8


@pytest.mark.parametrize(
    ("model", "plan"), [(model, plan) for model, plans in RECORDED.items() for plan in plans]
)
def test_recorded_plans(model: str, plan: str) -> None:
    def errors(counts: list[int]) -> list[float]:
        return [FLOOR * 2 ** (n / 8) for n, count in enumerate(counts) for _ in range(count)]

    phases = RECORDED[model][plan].items()
    stock = RECORDED[model]["stock"]
    found = [excess(errors(stock[phase]), errors(counts)) for phase, counts in phases]
    is_wrong = any(far > limit for *_, far, limit in found)
    assert is_wrong == plan.startswith(("norm", "silu_and_mul")), found


def test_an_operator_that_is_replaced_outside_the_plan_is_found() -> None:
    status, (culprit,), search = Machine(times(2.0, "acme_off zeros")).run()
    assert status == "found" and culprit.parts == ("acme_off zeros",)
    assert search.what["acme_off zeros"] == "operator zeros"
    changes = search.changes(culprit.parts)
    assert changes.values == {"ACME_OFF": ("acme_off", ["zeros"])} and not changes.orders


@pytest.mark.parametrize(
    ("own", "far", "is_named"), [(0, 9, 0), (0, 10, 1), (2, 15, 0), (2, 16, 1)]
)
def test_chance_may_send_tokens_to_other_experts(own: int, far: int, is_named: bool) -> None:
    wrong = Machine(times(1.0), own_far=own, far=lambda ours: far if "rms_norm" in ours else own)
    status, _, search = wrong.run()
    assert (status == "found") == is_named
    assert search.plan.facts["far"] == far
    assert search.plan.facts["far_allowed"] == (9, None, 15)[own]


def test_ops_that_are_wrong_only_together() -> None:
    _, (culprit,), _ = Machine(times(2.0, "rms_norm", "rotary_embedding")).run()
    assert {*culprit.parts} == {"rms_norm", "rotary_embedding"}


def test_ops_in_which_the_two_agree_are_not_tried() -> None:
    same = {op: {"impl": "vendor.acme"} for op in OPS if op != "rms_norm"}
    machine = Machine(times(2.0, "rms_norm"), baseline=same)
    _, (culprit,), search = machine.run()
    assert culprit.parts == ("rms_norm",) and search.differing == {"rms_norm": "vendor.acme"}
    assert all(left <= {"rms_norm", *REPLACED} for _, left in machine.started)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_wrong(value: float) -> None:
    _, (culprit,), _ = Machine(times(value, "rms_norm")).run()
    assert culprit.parts == ("rms_norm",) and culprit.verdict.facts["times"] is None


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        (Machine(lambda ours: 1.0, noise=math.nan), "baseline's log-probabilities are not finite"),
        (Machine(times(2.0, "rms_norm"), dies="attention_backend"), "without"),
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
            r"chooses op 'silu_and_mul' by size \(vendor.cpu",
        ),
    ],
)
def test_errors(machine: Machine, problem: str) -> None:
    with pytest.raises(VllmFLError, match=problem):
        machine.run()
