"""The plan: each op's implementation, its description and reason; sealing against demotion."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import pytest
import torch
from builders import X, failing, half, managing, norm, planning, refusing, silu

from vllm_fl import BackendImplKind, OpImpl
from vllm_fl.dispatch.context import building
from vllm_fl.dispatch.resolver import FOREIGN, STOCK, Candidate, Trace
from vllm_fl.engine.plan import Plan, PlanEntry, active_plan, release_number, take_number
from vllm_fl.engine.start_line import line, notes
from vllm_fl.errors import CallError
from vllm_fl.plugins.registry import known_contracts

MODES = ["eager", "compiled"]
THEN_REFERENCE = {"silu_and_mul": ["vendor", "reference"]}


@pytest.mark.parametrize("mode", MODES)
def test_every_contract_has_an_entry_and_what_nobody_brings_is_stock(mode: Any) -> None:
    plan = planning(managing(silu("vendor.acme")), mode)
    assert set(plan.entries) == {*known_contracts().contracts, "attention_backend"}
    labels = {op: entry.label for op, entry in plan.entries.items()}
    assert labels.pop("silu_and_mul") == "vendor.acme"
    assert set(labels.values()) == {"stock"}
    assert plan.is_stock("rms_norm") and not plan.is_stock("silu_and_mul")
    assert plan.is_stock("an_op_that_nobody_knows")
    assert plan.entries["silu_and_mul"].reason == "the order lists vendor"
    assert plan.entries["rms_norm"].reason == "default, no order for this op"


def test_the_line() -> None:
    plan = planning(
        managing(silu("vendor.acme"), norm("vendor.acme", lambda x, residual: x)),
        "eager",
        notes={"rms_norm": "the user set the IR priority"},
    )
    text = "vllm-fl: 1 op planned: silu_and_mul=vendor.acme (eager; verified in 2.0 s)"
    assert line(plan, "verified in 2.0 s") == text
    assert notes(plan) == ["rms_norm: the user set the IR priority"]
    assert not plan.entries["rms_norm"].impls
    assert plan.entries["rms_norm"].reason == "the user set the IR priority"
    unseen = ["silu_and_mul", "an_op_that_is_not_planned"]
    nothing = "vllm-fl: 0 ops planned: all is vLLM's own code (eager; x)"
    assert line(plan, "x", not_reached=unseen) == nothing
    assert notes(plan, unseen)[-1] == "unused by this model: silu_and_mul"


@pytest.mark.parametrize("vendor", ["acme", 90 * "x"])
def test_no_plan_has_a_long_line(vendor: str) -> None:
    def drawn(op: str, first: Any) -> PlanEntry:
        return PlanEntry(op, ((None, Trace(op, "eager", (), (Candidate(first, "selected", ""),))),))

    impl = OpImpl("op", f"vendor.{vendor}", BackendImplKind.VENDOR, lambda x: x, vendor=vendor)
    firsts = [impl, impl, FOREIGN, STOCK] * 10
    entries = {f"op_{n}": drawn(f"op_{n}", first) for n, first in enumerate(firsts)}
    text = line(Plan("compiled", entries), "verified in 1234.5 s", "digest 0123456789abcdef")
    assert len(text) <= 200 and text.startswith("vllm-fl: 30 ops planned: op_0=vendor.")
    assert text.endswith("; verified in 1234.5 s; digest 0123456789abcdef)")
    named = [word for word in text.split() if "=" in word]
    assert 0 < len(named) <= 5 and f" and {30 - len(named)} more (" in text


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_call_is_counted_to_who_computed_it(mode: Any) -> None:
    def refuses_nine(x: torch.Tensor) -> bool | str:
        return len(x) != 9 or "nine rows"

    manager = managing(
        silu("vendor.acme", supports=refuses_nine),
        silu("reference.torch", supports=lambda x: x.is_floating_point() or "integers"),
        per_op_order=THEN_REFERENCE,
    )
    plan = planning(manager, mode)
    plan.bind("silu_and_mul", object(), frozenset())(X)
    assert plan.calls == {}, "only where it is asked for"
    plan = dataclasses.replace(planning(manager, mode), counts_calls=True)
    bound = plan.bind("silu_and_mul", object(), frozenset())
    for rows in (4, 9, 9, 9, 5):
        bound(torch.randn(rows, 8))
    computed = {("silu_and_mul", "vendor.acme"): 2, ("silu_and_mul", "reference.torch"): 3}
    assert plan.calls == computed
    assert plan.fallbacks == {("silu_and_mul", "reference.torch"): 3}
    with pytest.raises(CallError if mode == "eager" else Exception):
        bound(torch.ones(9, 8, dtype=torch.int64))
    assert plan.calls == computed, "that call was not computed"
    plan.record.begin(keeps_calls=True)
    assert plan.calls == computed and not plan.fallbacks and not plan.record.refusals
    plan.record.begin()
    assert not plan.calls


def test_strict_and_a_backend_listed_alone_that_is_absent() -> None:
    """docs/settings.md: vLLM's implementation follows, unless VLLM_FL_STRICT=1."""
    impls = silu("vendor.acme"), silu("vendor.cpu", available=lambda: "no AVX")

    def entry(*listed: str, strict: bool = True, **fields: Any) -> PlanEntry:
        manager = managing(*impls, per_op_order={"silu_and_mul": listed}, strict=strict)
        plan = planning(manager, "eager", **fields)
        assert {op for op, each in plan.entries.items() if each.unmet} <= {"silu_and_mul"}
        return plan.entries["silu_and_mul"]

    lax = entry("impl:vendor.cup", strict=False)
    assert (lax.label, lax.unmet) == ("stock", "")
    assert "silu_and_mul" in entry("impl:vendor.cup").unmet
    assert "impl:vendor.cup" in entry("impl:vendor.cup").unmet
    assert "vendor.cpu: not available: no AVX" in entry("vendor:cpu").unmet
    assert entry("vendor:cpu", "stock").unmet == ""
    kept = {"silu_and_mul": "custom_ops has -silu_and_mul"}  # the user chose stock
    assert entry("vendor:cpu", notes=kept).unmet == ""


class TestSealed:
    def test_a_refusal_falls_back_and_is_counted_and_said_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", logger="vllm_fl")
        impls = refusing("vendor.acme", "no"), silu("reference.torch")
        plan = planning(managing(*impls, per_op_order=THEN_REFERENCE), "eager")
        bound = plan.bind("silu_and_mul", object(), frozenset())
        for _ in range(3):
            bound(X)
        assert plan.fallbacks == {("silu_and_mul", "reference.torch"): 3}
        assert plan.record.refusals == {("silu_and_mul", "vendor.acme"): 3}
        assert [r.getMessage() for r in caplog.records] == [
            "Implementation 'vendor.acme' does not support a call of op 'silu_and_mul': no",
            "Op 'silu_and_mul' fallback to 'reference.torch' (kind=reference, vendor=None)",
        ]

    def test_a_failure_is_raised_each_time_and_demotes_nothing(self) -> None:
        boom = ValueError("boom")
        impls = failing("vendor.acme", boom), silu("reference.torch")
        manager = managing(*impls, per_op_order=THEN_REFERENCE)
        plan = planning(manager, "eager")
        bound = plan.bind("silu_and_mul", object(), frozenset())
        for _ in range(2):
            with pytest.raises(ValueError) as caught:
                bound(X)
            assert caught.value is boom
        assert manager.demotions == {}
        assert plan.fallbacks == {}
        assert plan.record.failures == {("silu_and_mul", "vendor.acme"): "ValueError: boom"}


def test_building_nests_and_ends_with_an_exception() -> None:
    outer, inner = planning(managing(), "eager"), planning(managing(), "compiled")
    with building(outer):
        with pytest.raises(ValueError, match="out"), building(inner):
            assert active_plan() is inner
            raise ValueError("out")
        assert active_plan() is outer
    assert active_plan() is None


@pytest.mark.parametrize("mode", MODES)
def test_an_implementation_that_takes_the_layer(mode: Any) -> None:
    def silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
        return half(x) + self.mark

    class Layer:
        mark = 4

    plan = planning(managing(silu("vendor.acme", fn=silu_and_mul)), mode)
    if plan.is_stock("silu_and_mul"):
        assert mode == "compiled"
        assert "layer" in dict(plan.entries["silu_and_mul"].rows[-1][1].rejected)["vendor.acme"]
    else:
        assert plan.bind("silu_and_mul", Layer(), frozenset())(X)[0, 0] == 5


def test_a_place_is_for_compiled_plans_and_the_first_that_is_free() -> None:
    manager = managing(silu("vendor.acme"))
    eager = planning(manager, "eager")
    assert take_number(eager) is eager and eager.number == 1
    plans = [take_number(planning(manager, "compiled")) for _ in range(3)]
    try:
        assert [plan.number for plan in plans] == [1, 2, 3]
        release_number(plans.pop(1))
        plans += [take_number(planning(manager, "compiled")) for _ in range(2)]
        assert [plan.number for plan in plans] == [1, 3, 2, 4]
    finally:
        for plan in plans:
            release_number(plan)


def test_calls_that_no_compiler_sees_go_through_the_chain_in_a_compiled_plan_too() -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("not today")

    first = silu("vendor.acme", fn=silu_and_mul, traceable=True)
    plan = planning(managing(first, silu("vendor.beta", 3)), "compiled")
    bound = plan.bind("silu_and_mul", object(), frozenset(), traced=False)
    assert bound(X)[0, 0] == 4
    assert plan.fallbacks == {("silu_and_mul", "vendor.beta"): 1}


def test_a_sealed_plan_logs_so_many_refusals_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm_fl")
    numbers = itertools.count()
    odd = silu("vendor.acme", supports=lambda x: f"no room for {next(numbers)} tokens")
    plan = planning(managing(odd, silu("vendor.beta"), prefer="vendor"))
    bound = plan.bind("silu_and_mul", object(), frozenset())
    for _ in range(1100):
        bound(X)
    records = [record for record in caplog.records if "no room for" in record.getMessage()]
    assert 0 < len(records) <= 1000
    assert plan.fallbacks["silu_and_mul", "vendor.beta"] == 1100
