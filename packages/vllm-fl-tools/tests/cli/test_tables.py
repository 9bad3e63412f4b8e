"""What the verbs say of the table that a setting names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import Command, Plugin

from vllm_fl.contracts import contracts
from vllm_fl.dispatch import get_default_manager, reset_default_manager
from vllm_fl.engine.identity import contract_digest, identity
from vllm_fl.settings.table import Figure, Row, Table, TunedOp, Verdict
from vllm_fl_tools.cli import doctor

OP = "silu_and_mul"
TWO = """
@hookimpl
def register_ops():
    return [vendor("acme"), vendor("zeta")]
"""
WRONG = "wrong: result 0: 3 of 64 elements are off"


@pytest.fixture
def table(fl: Command, plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`table(**fields)`: the file of a table of this machine, with two vendors' kernels."""
    import torch

    name = plugin(TWO)

    def written(**changed: Any) -> str:
        snapshot = get_default_manager().registry.snapshot()
        figures = (
            Figure(16, "vendor.acme", 3.0, 2.5, 3.5, 21, 1.0, 1.0, 0.5),
            Figure(16, "vendor.zeta", 2.0, 1.5, 2.5, 21, 1.5, 1.4, 0.75),
            Figure(64, "vendor.zeta", rejected=WRONG),
            Figure(64, "vendor.acme", 4.0, 3.5, 4.5, 21, 1.0, 1.0, 0.5),
        )
        digest = contract_digest(contracts()[OP])
        fields: dict[str, Any] = {
            "identity": identity(torch.device("cpu"), snapshot.owners.values()),
            "mode": "eager",
            "dtype": "bfloat16",
            "sizes": {"hidden": 64},
            "model": "tiny",
            "date": "2026-11-22T17:00:00+00:00",
            "seconds": 1.0,
            "ops": {OP: TunedOp(digest, "vendor.acme", (Row(16, "vendor.zeta"),), figures)},
            "accepted": Verdict(True, "never slower", "2026-11-23T17:00:00+00:00"),
        }
        path = tmp_path / "table.json"
        path.write_text(Table(**{**fields, **changed}).text, encoding="utf-8")
        reset_default_manager()
        return str(path)

    assert name
    return written


def test_explain_shows_the_rows_and_their_figures(fl: Command, table: Any) -> None:
    path = table()
    answer = fl("explain", OP, "--json", VLLM_FL_TABLE=path).json()
    eager, compiled = answer["modes"]
    (script,) = fl("explain", OP, "--script", "--json", VLLM_FL_TABLE=path).json()["modes"]
    device = answer["table"]["identity"]["device"]
    assert eager["origin"] == f"op_backends.{OP}, table {path}, measured 2026-11-22 on {device}"
    assert script["origin"] == compiled["origin"] == "prefer=flagos, default"
    assert answer["table"]["rows"] == [{"up_to": 16, "impl": "vendor.zeta"}]
    assert answer["table"]["obstacle"] is None
    serving = [(f["tokens"], f["impl"]) for f in answer["table"]["figures"] if f["serves"]]
    assert serving == [(16, "vendor.zeta"), (64, "vendor.acme")]
    text = fl("explain", OP, VLLM_FL_TABLE=path).out
    assert "It orders this op in such engines" in text and WRONG in text
    assert "1.500" in text and "75%" in text


@pytest.fixture(autouse=True)
def of_the_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor's checks of what is installed are slow, and tested in test_doctor_verb.py."""
    monkeypatch.setattr(doctor, "CHECKS", ())


def found(fl: Command, path: str) -> list[tuple[str, str]]:
    answer = fl("doctor", "--json", VLLM_FL_TABLE=path).json()
    return [(f["what"], f["why"]) for f in answer["findings"] if f["check"] == "table"]


def test_doctor_checks_a_named_one_without_an_engine(fl: Command, table: Any) -> None:
    path = table()
    assert found(fl, path) == []
    ((what, why),) = found(fl, table(accepted=None))
    assert path in what and why.startswith("it was never accepted.")
    ((what, why),) = found(fl, table(identity={"device": "NVIDIA H100"}))
    assert "has no effect here" in what and "it was measured with" in why
    gone = {OP: TunedOp(contract_digest(contracts()[OP]), "stock", (Row(4, "vendor.gone"),))}
    ((what, why),) = found(fl, table(ops=gone))
    assert OP in what and why == "'vendor.gone' is not installed."
