"""A table acts where it was measured, for what it was measured; elsewhere the first thing that
differs is named."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
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
from vllm_fl.engine.identity import contract_digest, identity, is_measured
from vllm_fl.engine.of_0_2_0 import CONTRACTS
from vllm_fl.engine.plan import make_plan
from vllm_fl.engine.tables import Standing, here, standing, under
from vllm_fl.plugins.registry import SCRIPT, OpRegistry, Owner
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.table import Row, Table, TunedOp, Verdict, read_table

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


def test_the_kernels_that_a_row_names_come_before_the_order_without_the_table(facts: Any) -> None:
    engine = facts(table(), {"VLLM_FL_PREFER": "reference"})
    policy = under(engine, stands(engine)).settings.policy
    first, *rest = policy.order("silu_and_mul", engine=True, tokens=3)
    assert str(first) == "impl:vendor.zeta"
    assert tuple(rest) == engine.settings.policy.order("silu_and_mul", engine=True)
    assert policy.order("silu_and_mul", engine=True, tokens=17) == tuple(rest)


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


@pytest.mark.parametrize(
    ("name", "then", "now"),
    [
        ("driver", "570.1", "580.2"),
        ("device", "NVIDIA H100", "NVIDIA H200"),
        ("vllm-fl-cuda", "0.1.0 0123456789abcdef", "0.1.0 fedcba9876543210"),
        ("libcudart", None, "13.0"),
    ],
)
def test_another_machine_or_other_code_is_named(
    name: str, then: str | None, now: str, facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = table().identity | ({name: then} if then else {})
    monkeypatch.setattr(tables, "identity", lambda device, owners: {**measured, name: now})
    found = stands(facts(table(identity=measured)))
    assert f"{name} is {now}; it was measured with {then or 'none'}" in found.reason


def test_a_changed_source_file_of_a_backend_is_another_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.engine import digest

    package = tmp_path / "fl_changing"
    package.mkdir()
    source = package / "__init__.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    for text in ("A = 1\n", "A = 2\n", "A = 1\n"):
        source.write_text(text)
        digest._code_of.cache_clear()  # one process reads it once
        registry = OpRegistry()
        registry.register_many([silu("vendor.acme")], Owner("fl_changing"))
        named = table(identity={"fl_changing": ""})
        seen.append(here(named, registry.snapshot(), CPU))
    assert table(identity=seen[0]).differs(seen[2]) is None
    assert "fl_changing is " in str(table(identity=seen[0]).differs(seen[1]))


def test_a_backend_that_it_was_not_measured_with_is_no_other_identity() -> None:
    registry = OpRegistry()
    registry.register_many([silu("vendor.acme")])
    registry.register_many([silu("vendor.late")], Owner("late"))
    measured = table()
    assert measured.differs(here(measured, registry.snapshot(), CPU)) is None
    both = table(identity={**measured.identity, "late": "None 0123456789abcdef"})
    assert "late is " in str(both.differs(here(both, registry.snapshot(), CPU)))
    assert "late is not there" in str(both.differs(here(both, manager().registry.snapshot(), CPU)))


def test_only_an_engine_knows_its_threads() -> None:
    other = table(identity={**table().identity, "threads": "77"})
    snapshot = manager().registry.snapshot()
    assert "threads is" in str(other.differs(here(other, snapshot, CPU)))
    assert other.differs(here(other, snapshot, CPU, serves=False)) is None


def test_without_a_device_nobody_asks_for_it(facts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that makes the configuration must not open one: its workers are forked."""
    measured = table()
    engine = facts(measured)
    monkeypatch.setattr(tables, "identity", lambda *_: pytest.fail("a device was asked for"))
    assert stands(engine, None).digest == measured.digest
    of_any_model = replace(engine, dtype=None, sizes=None)
    assert stands(of_any_model, None).digest == measured.digest


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


def test_one_of_release_0_2_0_acts(facts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`table_0_2_0.json` was written by that release, which knew contracts by their source."""
    old = read_table(str(Path(__file__).with_name("table_0_2_0.json")))
    now = {**old.identity, "vllm-fl-core": "0.3.0 fedcba9876543210"}
    monkeypatch.setattr(tables, "identity", lambda device, owners: {**now})
    engine = facts(old, sizes=replace(SIZES, hidden=512))
    found = stands(engine)
    assert found == Standing(digest=old.digest)
    plan = make_plan(manager(), under(engine, found))
    assert plan.entries["silu_and_mul"].label == "vendor.zeta(<=16)|vendor.acme"
    for name, other in (("device", "another CPU"), ("vllm-fl-core", "")):
        monkeypatch.setattr(tables, "identity", lambda *_, n=name, o=other: {**now, n: o})
        measured = replace(old, identity={**old.identity, "vllm-fl-core": "0.1.0 0123"})
        assert f"{name} is" in stands(facts(old if other else measured)).reason
    other_code = {**old.identity, "vllm-fl-core": "0.2.0 fedcba9876543210"}
    monkeypatch.setattr(tables, "identity", lambda *_: {**other_code})
    assert "vllm-fl-core is 0.2.0" in stands(engine).reason  # no other release: a change of it


def test_another_release_of_the_same_code_is_as_fast(
    facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is registered counts: a device's name may end like another's."""
    (name, *_) = {owner.label for owner in manager().registry.snapshot().owners.values()}
    engine = facts(table(identity={"device": "One CPU", name: "1.0 5f0c"}))
    for told, holds in (("1.1 5f0c", True), ("1.1 77aa", False), ("1.1", False)):
        now = {"device": "One CPU", name: told}
        monkeypatch.setattr(tables, "identity", lambda *_, now=now: {**now})
        assert bool(stands(engine).digest) is holds, told
    unread = facts(table(identity={"device": "One CPU", name: f"1.0 {UNKNOWN}"}))
    now = {"device": "One CPU", name: f"1.1 {UNKNOWN}"}
    monkeypatch.setattr(tables, "identity", lambda *_, now=now: {**now})
    assert f"{name} is 1.1" in stands(unread).reason, "code that nobody read is not the same"
    now = {"device": "Another CPU", name: "1.0 5f0c"}
    monkeypatch.setattr(tables, "identity", lambda *_: {**now})
    assert "device is Another CPU" in stands(engine).reason


@pytest.mark.parametrize("op", CONTRACTS)
def test_tables_of_0_2_0_know_a_contract_that_means_the_same(op: str) -> None:
    """One that is changed on purpose, and so must not be known, leaves `CONTRACTS`."""
    spec, (told, _) = contracts()[op], CONTRACTS[op]
    assert is_measured(spec, told)
    assert not is_measured(replace(spec, consumable=spec.consumable ^ {spec.parameters[0]}), told)


OF_A_PLUGIN = """\
from vllm_fl import OpSpec, Tolerance, Variant

def doubled(x):
    return x.double() * 2

def nothing(*_, **__):
    return ()

SPEC = OpSpec(
    doubled, (Variant("", "(Tensor x) -> Tensor"),), nothing, nothing, nothing, nothing,
    frozenset({"x"}), nothing, {"float32": Tolerance(1e-6, 1e-5, "")},
)
"""


def test_tables_of_0_2_0_know_contracts_of_plugins_by_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "fl_of_0_2_0.py"
    module.write_text(OF_A_PLUGIN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = import_module(module.stem).SPEC
    assert is_measured(spec, "6e74033eca8de985")
    module.write_text(OF_A_PLUGIN + "# changed\n", encoding="utf-8")
    assert not is_measured(spec, "6e74033eca8de985")


def test_lists_of_the_user_win_over_it(facts: Any) -> None:
    engine = facts(table(), {"VLLM_FL_PER_OP": "silu_and_mul=reference|stock"})
    order = under(engine, stands(engine)).settings.policy.per_op_order["silu_and_mul"]
    assert order == OpOrder.of(["reference", "stock"])
