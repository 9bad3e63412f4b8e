"""Output of the verbs about the configured table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import Command, Plugin

from vllm_fl.engine.facts import EngineFacts
from vllm_fl.settings.loading import load_settings
from vllm_fl_tools.cli import doctor

OP = "silu_and_mul"
TEXT = f"""
holds: {{device: cpu, distributions: {{}}}}
devices:
- name: cpu
  op_backends:
    {OP}:
      eager: {{"<=16": impl:vendor.zeta, rest: impl:vendor.acme}}
      measured: {{date: 2026-11-22, device: cpu, ratio: 1.5, what: 16 tokens}}
"""
TWO = """
@hookimpl
def register_ops():
    return [vendor("acme"), vendor("zeta")]
"""


@pytest.fixture
def table(plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`table(text)`: the file of a table of this machine, with two vendors' kernels."""
    plugin(TWO)
    monkeypatch.setattr(doctor, "INSTALL_CHECKS", ())  # they are slow, and tested elsewhere

    def written(text: str = TEXT) -> str:
        path = tmp_path / "table.yaml"
        path.write_text(text)
        return str(path)

    return written


def test_explain_shows_its_orders(fl: Command, table: Any) -> None:
    answer = fl("explain", OP, "--script", "--json", VLLM_FL_TABLE=table()).json()
    (script,) = answer["modes"]
    assert script["origin"] == "prefer=flagos, default", "a script knows no device"
    (order,) = answer["devices"]["orders"]
    assert "on cpu: " in order and "1.5 times as fast in 16 tokens" in order


def test_doctor_checks_it_without_an_engine(fl: Command, table: Any) -> None:
    def found(path: str) -> list[tuple[str, str]]:
        answer = fl("doctor", "--json", VLLM_FL_TABLE=path).json()
        return [(f["what"], f["why"]) for f in answer["findings"] if f["check"] == "table"]

    assert found(table()) == []
    ((what, why),) = found(table(TEXT.replace("device: cpu", "device: H100", 1)))
    assert "is ignored here" in what and "the measurement used H100" in why


def test_an_engine_goes_on_without_one_that_does_not_hold(table: Any) -> None:
    settings = load_settings({"VLLM_FL_TABLE": table()})
    for mode, device, words in (
        ("eager", "cpu", ""),
        ("eager", "H100", "the device is H100"),
        ("eager", "", "the device is unknown"),
        ("compiled", "cpu", "it has no orders for compiled engines"),
    ):
        facts = EngineFacts(settings, mode, device=device).with_checked_table()  # type: ignore[arg-type]
        assert facts.settings.tuned is not None
        assert facts.settings.tuned.unused.startswith(words)
        assert bool(facts.settings.tuned.unused) == bool(words)
        assert (OP in facts.ordered.settings.policy.per_op_order) is (not words)
