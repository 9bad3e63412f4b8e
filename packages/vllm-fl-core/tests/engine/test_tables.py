"""A table acts where it was measured, for what it was measured; elsewhere the first thing that
differs is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import silu

from vllm_fl.contracts import ModelSizes, contracts
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.engine import tables
from vllm_fl.engine.digest import UNKNOWN
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.identity import contract_digest, identity
from vllm_fl.engine.plan import make_plan
from vllm_fl.engine.tables import Standing, standing, under
from vllm_fl.plugins.registry import SCRIPT, OpRegistry
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.table import Row, Table, TunedOp, Verdict

CPU = torch.device("cpu")
SIZES = ModelSizes(
    hidden=512, intermediate=1536, tokens=(1, 2048), more={"experts": 8, "top": None}
)
ACCEPTED = Verdict(True, "never slower", "2026-11-22T17:00:00+00:00")


def manager() -> OpManager:
    registry = OpRegistry()
    registry.register_many([silu("vendor.acme"), silu("vendor.zeta"), silu("reference.torch")])
    return OpManager(registry)


def table(**changed: Any) -> Table:
    """A table of this machine."""
    tuned = TunedOp(
        contract_digest(contracts()["silu_and_mul"]),
        "vendor.acme",
        (Row(16, "vendor.zeta"), Row(64, "default"), Row(256, "stock")),
    )
    fields: dict[str, Any] = {
        "identity": identity(CPU, [SCRIPT]),
        "mode": "eager",
        "dtype": "bfloat16",
        "sizes": {"hidden": 512, "intermediate": 1536, "experts": 8, "max_position": 40960},
        "model": "tiny",
        "date": "2026-11-22T17:00:00+00:00",
        "seconds": 1.0,
        "ops": {"silu_and_mul": tuned},
        "accepted": ACCEPTED,
    }
    return Table(**{**fields, **changed})


@pytest.fixture
def facts(tmp_path: Path) -> Any:
    """`facts(table, variables, …)`: an engine whose settings name this table."""

    def made(named: Table, variables: dict[str, str] | None = None, **fields: Any) -> EngineFacts:
        path = tmp_path / "table.json"
        path.write_text(named.text, encoding="utf-8")
        settings = load_settings({"VLLM_FL_TABLE": str(path), **(variables or {})})
        told = {"mode": "eager", "dtype": torch.bfloat16, "sizes": SIZES, **fields}
        return EngineFacts(settings, **told)

    return made


def stands(facts: EngineFacts, device: torch.device | None = CPU) -> Standing:
    return standing(facts, manager().registry.snapshot(), device)


def test_it_acts_where_it_was_measured(facts: Any) -> None:
    engine = facts(table())
    found = stands(engine)
    assert found == Standing(digest=table().digest)
    policy = under(engine, found).settings.policy
    assert policy.order("silu_and_mul", engine=True, tokens=16)[0].name == "vendor.zeta"
    assert [str(t) for t in policy.order("silu_and_mul", engine=True, tokens=200)] == ["stock"]
    plan = make_plan(manager(), under(engine, found))
    assert plan.entries["silu_and_mul"].label == (
        "vendor.zeta(<=16)|vendor.acme(<=64)|stock(<=256)|vendor.acme"
    )
    assert make_plan(manager(), engine).entries["silu_and_mul"].label == "vendor.acme"


@pytest.mark.parametrize(
    ("changed", "fields", "words"),
    [
        ({"mode": "compiled"}, {}, "for compiled engines, and this one is eager"),
        ({"dtype": "float16"}, {}, "in float16, and the model has bfloat16"),
        ({}, {"sizes": replace(SIZES, hidden=1024)}, "hidden 512, and the model has 1024"),
        ({}, {"sizes": replace(SIZES, more={"experts": 4})}, "experts 8, and the model has 4"),
    ],
)
def test_what_differs_is_named_and_the_plan_is_made_without_it(
    facts: Any, changed: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    engine = facts(table(**changed), **fields)
    found = stands(engine)
    assert not found.digest and words in found.reason
    assert engine.settings.table in found.reason and "vllm-fl tune" in found.reason
    assert under(engine, found) is engine


@pytest.mark.parametrize(("name", "then"), [("device", "NVIDIA H100"), ("libcudart", None)])
def test_another_machine_or_other_code_is_named(
    name: str, then: str | None, facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = table().identity | ({name: then} if then else {})
    monkeypatch.setattr(tables, "identity", lambda device, owners: {**measured, name: "new"})
    found = stands(facts(table(identity=measured)))
    assert f"{name} is new; it was measured with {then or 'none'}" in found.reason


def test_without_a_device_nobody_asks_for_it(facts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that makes the configuration must not open one: its workers are forked."""
    engine = facts(table())
    monkeypatch.setattr(tables, "identity", lambda *_: pytest.fail("a device was asked for"))
    assert stands(replace(engine, dtype=None, sizes=None), None).digest == table().digest


def test_one_that_nobody_accepted_acts_only_when_told_to(facts: Any) -> None:
    refused = Verdict(False, "slower at batch 1", "2026-11-22T17:00:00+00:00")
    for verdict, words in ((None, "never accepted"), (refused, "not accepted: slower at batch 1")):
        found = stands(facts(table(accepted=verdict)))
        assert not found.digest and words in found.reason
        assert "VLLM_FL_TABLE_UNACCEPTED=1" in found.reason
        told = facts(table(accepted=verdict), {"VLLM_FL_TABLE_UNACCEPTED": "1"})
        assert stands(told).digest == table().digest


def test_rows_that_cannot_hold_are_left_out_by_name(facts: Any) -> None:
    tuned = table().ops["silu_and_mul"]
    ops = {
        "silu_and_mul": replace(tuned, rows=(Row(16, "vendor.gone"), Row(64, "vendor.zeta"))),
        "rms_norm": replace(tuned, rows=(Row(16, "stock"),)),
        "of_another_plugin": tuned,
    }
    engine = facts(table(ops=ops))
    found = stands(engine)
    assert found.digest and found.left_out == {
        "silu_and_mul": "'vendor.gone' is not installed",
        "rms_norm": "its contract is another one than was measured",
        "of_another_plugin": "no contract names it",
    }
    assert under(engine, found).settings.policy == engine.settings.policy


def test_another_release_of_the_same_code_is_as_fast(
    facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, *_) = {owner.label for owner in manager().registry.snapshot().owners.values()}
    for then, now, holds in (
        ("1.0 5f0c", "1.1 5f0c", True),
        ("1.0 5f0c", "1.1 77aa", False),
        ("1.0 5f0c", "1.1", False),
        (f"1.0 {UNKNOWN}", f"1.1 {UNKNOWN}", False),  # code that could not be read
    ):
        engine = facts(table(identity={"device": "One CPU", name: then}))
        here = {"device": "One CPU", name: now}
        monkeypatch.setattr(tables, "identity", lambda *_, here=here: {**here})
        assert bool(stands(engine).digest) is holds, now


def test_lists_of_the_user_win_over_it(facts: Any) -> None:
    engine = facts(table(), {"VLLM_FL_PER_OP": "silu_and_mul=reference|stock"})
    order = under(engine, stands(engine)).settings.policy.per_op_order["silu_and_mul"]
    assert order == OpOrder.of(["reference", "stock"])
