"""A pinned table in the worker: one plan on all ranks, and one line where it does not act."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import torch
import vllm.platforms
from builders import silu

import vllm_fl.dispatch
from vllm_fl.contracts import ModelSizes, contracts
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.identity import contract_digest, identity
from vllm_fl.engine.plan import Plan
from vllm_fl.engine.tables import Standing
from vllm_fl.errors import VllmFLError
from vllm_fl.integration import planning, verifying
from vllm_fl.integration.ranks import Verdict, common_table
from vllm_fl.plugins.registry import SCRIPT, OpRegistry
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.table import Row, Table, TunedOp
from vllm_fl.settings.table import Verdict as Accepted

OP = "silu_and_mul"
SIZES = ModelSizes(hidden=512)
Start = Callable[..., tuple[Plan, dict[str, Any], list[str], Standing]]


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpManager]:
    """A worker's process in which two implementations are installed."""
    registry = OpRegistry()
    registry.register_many([silu("vendor.acme"), silu("vendor.zeta")])
    manager = OpManager(registry)
    monkeypatch.setattr(vllm_fl.dispatch, "_default", manager)
    monkeypatch.setattr(planning, "foreign_ops", dict)
    monkeypatch.setattr(
        vllm.platforms, "_current_platform", SimpleNamespace(vllm_fl_platform="cpu")
    )
    return manager


def table(**changed: Any) -> Table:
    tuned = TunedOp(contract_digest(contracts()[OP]), "vendor.acme", (Row(16, "vendor.zeta"),))
    fields: dict[str, Any] = {
        "identity": identity(torch.device("cpu"), [SCRIPT]),
        "mode": "eager",
        "dtype": "bfloat16",
        "sizes": {"hidden": 512},
        "model": "tiny",
        "date": "2026-11-22T17:00:00+00:00",
        "seconds": 1.0,
        "ops": {OP: tuned},
        "accepted": Accepted(True, "never slower", "2026-11-22T18:00:00+00:00"),
    }
    return Table(**{**fields, **changed})


@pytest.fixture
def start(process: OpManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(table, *tables of the other ranks, **variables)`: what rank 0 runs with."""

    def started(named: Table | None, *others: Standing, **variables: str) -> Any:
        standings = [*others]

        def agree(mine: Verdict) -> list[Verdict]:
            theirs = [replace(mine, rank=n, table=t) for n, t in enumerate(standings, 1)]
            common = common_table([mine, *theirs])
            standings[:] = [common] * len(standings)  # as they go on
            return [mine, *theirs]

        monkeypatch.setattr(verifying, "agree", agree)
        if named is not None:
            path = tmp_path / "table.json"
            path.write_text(named.text, encoding="utf-8")
            variables["VLLM_FL_TABLE"] = str(path)
        settings = load_settings({"VLLM_FL_PREFLIGHT": "off", **variables})
        facts = EngineFacts(settings, "eager", dtype=torch.bfloat16, sizes=SIZES)
        preflight = verifying.Start(facts, 0, torch.device("cpu"))
        found = verifying.verified_plan(preflight, alone=not others)
        return *found, preflight.limits(found[0]), preflight.table

    log = logging.getLogger("vllm_fl")
    monkeypatch.setattr(log, "propagate", True)
    yield started


def test_another_identity_is_one_warning_and_no_table(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    mine = table()
    elsewhere = replace(mine, identity={**mine.identity, "torch": "1.0"})
    _, contents, _, standing = start(elsewhere)
    assert "table" not in contents and not standing.digest
    (line,) = [r.getMessage() for r in caplog.records if "table" in r.getMessage()]
    assert f"torch is {torch.__version__}" in line and "it was measured with 1.0" in line
    assert line.endswith("Going on without a table [FL610]")
    with pytest.raises(VllmFLError, match=r"ends the start: rank 0: strict mode, .* with 1\.0"):
        start(elsewhere, VLLM_FL_STRICT="1")


def test_two_ranks_with_two_tables_have_none(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    mine = table()
    for other, words in (
        (Standing("0123456789abcdef"), "rank 1 has 0123456789abcdef"),
        (Standing(reason="The table t.json has no effect: device is H200"), "device is H200"),
        (Standing(), "rank 1 has none"),
    ):
        caplog.clear()
        _, contents, _, standing = start(mine, other)
        assert "table" not in contents and not standing.digest
        (line,) = [r.getMessage() for r in caplog.records if "tables" in r.getMessage()]
        assert f"rank 0 has {mine.digest}" in line and words in line
        with pytest.raises(VllmFLError, match="strict mode, and The ranks have different tables"):
            start(mine, other, VLLM_FL_STRICT="1")
