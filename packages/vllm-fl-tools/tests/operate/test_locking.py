"""What differs from a lock, and who says it."""

from __future__ import annotations

import json
import logging
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.lock import MARK, VERSION, Locked
from vllm_fl.settings.schema import Settings
from vllm_fl_tools.operate.errors import LockError
from vllm_fl_tools.operate.locking import differences, refuse

FACTS: dict[str, Any] = {
    "torch": "2.13.0",
    "vllm-fl-acme": "0.1.0 0123",
    "setting prefer": ["vendor", "environment VLLM_FL_PREFER"],
    "engine arguments": {"max_num_seqs": 8, "dtype": "torch.bfloat16"},
    "model configuration": {"hidden_size": 64, "head_dim": 16, "a": 1, "b": 1, "c": 1},
    "plan": {"rms_norm": "vendor.acme"},
}
LOCKED = Locked("vllm-fl.lock", FACTS, {}, 7)


def told(**changed: Any) -> list[str]:
    facts = FACTS | {name.replace("_", " "): value for name, value in changed.items()}
    return differences(LOCKED, {name: fact for name, fact in facts.items() if fact is not None})


def test_one_line_each() -> None:
    assert told() == []
    assert told(torch="2.14.0") == ["torch is 2.14.0; the lock has 2.13.0"]
    assert told(torch=None, zeta="1") == [
        "torch is nothing; the lock has 2.13.0",
        "zeta is 1; the lock has nothing",
    ]
    assert told(setting_prefer=["flagos", "fl.yaml:3"]) == [
        "setting prefer is flagos (fl.yaml:3); the lock has vendor (environment VLLM_FL_PREFER)"
    ]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    path = tmp_path / "vllm-fl.lock"
    contents = {"facts": FACTS, "result": {}, "seed": 7}
    path.write_text(json.dumps({MARK: VERSION, **contents}))
    return load_settings({"VLLM_FL_LOCK": str(path)})


def test_the_first_rank_says_what_differs_on_any(settings: Settings) -> None:
    by_rank = {1: ["torch is 1; the lock has 2", "nccl is 3; the lock has 4"], 0: ["torch is 1"]}
    by_rank[0] = by_rank[1][:1]
    refuse(settings, {0: [], 1: []}, says=True)
    with pytest.raises(LockError) as first:
        refuse(settings, by_rank, says=True)
    with pytest.raises(LockError) as second:
        refuse(settings, by_rank, says=False)
    lines = ("torch is 1; the lock has 2", "rank 1: nccl is 3; the lock has 4")
    assert first.value.differences == second.value.differences == lines
    assert all(line in str(first.value) and line not in str(second.value) for line in lines)
    assert settings.locked is not None and first.value.file == settings.locked.file
    travelled = pickle.loads(pickle.dumps(first.value))  # as from a worker of Ray's
    assert travelled.differences == lines and str(travelled) == str(first.value)


def test_a_warning_is_said_once(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm_fl"), "propagate", True)
    assert settings.locked is not None
    warns = load_settings({"VLLM_FL_LOCK": settings.locked.file, "VLLM_FL_LOCK_MODE": "warn"})
    for says in (True, False):
        refuse(warns, {0: ["torch is 1; the lock has 2"], 1: []}, says=says)
    (record,) = [record for record in caplog.records if "[FL505]" in record.getMessage()]
    assert "torch is 1; the lock has 2" in record.getMessage()
