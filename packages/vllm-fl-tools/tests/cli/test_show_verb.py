"""`vllm-fl show`: files of engines and of the command, recognised by their content."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tables
from commands import Command

REPORT = {
    "rank": 0,
    "mode": "eager",
    "digest": "f00d",
    "ops": {"rms_norm": {"impl": "vendor.cpu", "reason": "the order lists vendor"}},
    "calls": {"rms_norm": {"vendor.cpu": 7, "reference.torch": 2}},
    "refusals": {"rms_norm": {"vendor.cpu": 2}},
    "fallbacks": {"rms_norm": {"reference.torch": 2}},
    "demotions": {"silu_and_mul": {"vendor.acme": "failed at startup on rank 0: it is incorrect"}},
    "rejections": {},
    "not_reached": {"gelu_and_mul": "no layer of the model"},
}


def left(folder: Path, ago: float = 1, **changes: Any) -> str:
    """A report that was written `ago` seconds ago."""
    content = {
        "schema": 1,
        "written": (datetime.now(UTC) - timedelta(seconds=ago)).isoformat(timespec="seconds"),
        "state": "serving",
        "error": None,
        "model": "tiny",
        "rank": 0,
        "settings": ["VLLM_FL_PREFER=vendor"],
        "versions": {"vllm": "0.32.0"},
        "report": REPORT,
        **changes,
    }
    path = folder / "chat.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_plan_counters_what_was_taken_out_and_what_was_raised(fl: Command, tmp_path: Path) -> None:
    error = {"method": "execute_model", "why": "RuntimeError: boom", "time": "then"}
    failures = [{"op": "rms_norm", "impl": "vendor.cpu", "why": "RuntimeError: boom"}]
    path = left(tmp_path, ago=9999, state="ended", error=error, failures=failures)
    done = fl("show", path)
    assert done.status == 0 and not done.err
    for shown in ("f00d", "vendor.cpu", "it is incorrect", "boom", "PREFER=vendor", "0.32.0"):
        assert shown in done.out
    (shown,) = fl("show", path, "--json").json()["files"]
    assert shown["content"]["report"] == REPORT and shown["silent"] is None


@pytest.mark.parametrize(("state", "ago", "is_silent"), [
    ("serving", 5, False), ("serving", 500, True), ("starting", 500, True), ("failed", 500, False),
])  # fmt: skip
def test_a_process_that_was_killed_is_silent(
    fl: Command, tmp_path: Path, state: str, ago: float, is_silent: bool
) -> None:
    path = left(tmp_path, ago, state=state)
    (shown,) = fl("show", path, "--json").json()["files"]
    assert (shown["silent"] is not None) == is_silent
    assert ("The process is gone without a last report" in fl("show", path).out) == is_silent


def test_a_process_that_was_just_killed(fl: Command, tmp_path: Path) -> None:
    for pid, is_silent in ((os.getpid(), False), (2**30, True)):
        path = left(tmp_path, state="serving", pid=pid, host=socket.gethostname())
        (shown,) = fl("show", path, "--json").json()["files"]
        assert (shown["silent"] is not None) == is_silent


@pytest.mark.parametrize("content", [
    "", "{", "[]", "3", '{"schema": 1}', '{"schema": 1, "written": "now", "report": {}}',
    '{"schema": 1, "written": "2026-01-01T00:00:00+00:00", "report": {"ops": []}}',
    '{"schema": 1, "written": "2026-01-01T00:00:00", "report": {}}',
    '{"schema": 1, "plan": {}}', '{"schema": 1, "results": [{}]}',
])  # fmt: skip
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_what_is_no_report_is_an_error_of_usage(
    fl: Command, tmp_path: Path, content: str, more: tuple[str, ...]
) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    done = fl("show", str(path), *more)
    assert done.status == 2 and str(path) in done.err and "Traceback" not in done.err
    assert not done.out


def test_what_cannot_be_shown_is_an_error_of_usage_too(fl: Command, tmp_path: Path) -> None:
    assert fl("show", str(tmp_path / "missing.json")).status == 2
    assert fl("show", str(tmp_path)).status == 2
    assert "schema 2" in fl("show", left(tmp_path, schema=2)).err
    assert fl("show", left(tmp_path, rank=float("inf")), "--json").status == 2


def test_the_answers_of_verbs(fl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(fl("plan", "--json").out)
    tables.written(tmp_path / "table.json", tables.table(["relu2"]))
    done = fl("show", "plan.json", "table.json")
    assert done.status == 0, done.err
    assert "Any model: compiled" in done.out and "relu2" in done.out
    files = fl("show", "plan.json", "table.json", "--json").json()["files"]
    assert [each["kind"] for each in files] == ["plan", "table"]
