"""Lock files on a machine without an engine; tests/engine writes and uses one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Plugin

from vllm_fl.settings.lock import MARK, VERSION, read_lock
from vllm_fl_tools.cli._lock import text_of

CONTENTS: dict[str, Any] = {
    "facts": {"device": "Acme 9000", "plan": {"silu_and_mul": "vendor.acme"}, "tokens": [1, 2]},
    "result": {
        "ops": {"silu_and_mul": "vendor.acme(<=16)|stock", "rms_norm": "vendor.acme"},
        "digest": "0123",
        "out": {},
    },
    "seed": 7,
}


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "vllm-fl.lock"
    path.write_text(text_of(CONTENTS))
    return path


def test_a_file_that_git_can_compare(lock: Path) -> None:
    text = lock.read_text()
    assert json.loads(text) == {MARK: VERSION, **CONTENTS} and text.endswith("}\n")
    assert vars(read_lock(str(lock))) == {"file": str(lock), **CONTENTS, "warns": False}


def test_the_locked_plan_without_the_device(fl: Command) -> None:
    (file,) = fl("show", "vllm-fl.lock", "--json").json()["files"]
    assert (file["kind"], file["content"]["result"]) == ("lock", CONTENTS["result"])
    shown = fl("show", "vllm-fl.lock").out
    assert "vendor.acme(<=16)|stock" in shown
    assert "the plan of the lock file vllm-fl.lock, verified on Acme 9000" in shown


def test_ops_that_would_change(fl: Command, plugin: Plugin) -> None:
    plugin()
    diff = fl("plan", "--diff", "vllm-fl.lock", "--json").json()["diff"]
    assert diff["ops"] == {} and diff["differs"] == []  # without vLLM only the ops are known
    diff = fl("plan", "--diff", "vllm-fl.lock", "--json", VLLM_FL_PREFER="stock").json()["diff"]
    assert diff["ops"]["silu_and_mul"]["then"]["impl"] == "vendor.acme"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("show", "gone.lock"), None),
        (("show", "vllm-fl.lock"), "{"),
        (("plan", "--diff", "vllm-fl.lock"), '{"vllm_fl_lock": 1}'),
        (("plan", "--diff", "vllm-fl.lock"), "prefer: vendor"),  # a lock file by its name
        (("plan",), '{"vllm_fl_lock": 2}'),
        (("plan", "--save", "new.lock", "--model", "."), None),
        (("plan", "--save", "new.lock"), None),
    ],
)
def test_wrong_arguments(
    fl: Command, plugin: Plugin, lock: Path, words: tuple[str, ...], text: str | None
) -> None:
    plugin()
    if text is not None:
        lock.write_text(text)
    named = {"VLLM_FL_LOCK": str(lock)} if words == ("plan",) else {}
    done = fl(*words, "--json", **named)
    assert (done.status, done.out) == (2, "") and done.err
