"""Differences from a lock file, and the rank that reports them."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_fl.integration.patchers.linear_kernels import LinearKernels
from vllm_fl.plugins.inspection import VERIFIED_BEFORE, Moment
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.lock import MARK, VERSION, Locked
from vllm_fl_tools.operate.errors import LockError
from vllm_fl_tools.operate.locking import Lock, lock_differences

FACTS: dict[str, Any] = {
    "torch": "2.13.0",
    "setting": {"prefer": "vendor"},
    "argument": {"max_num_seqs": 8, "dtype": "torch.bfloat16"},
    "model configuration": {"hidden_size": 64, "head_dim": 16},
    "plan": {"rms_norm": "vendor.acme"},
}
LOCKED = Locked("vllm-fl.lock", FACTS, {}, 7)


def test_one_line_for_each_value() -> None:
    assert lock_differences(LOCKED, FACTS) == []
    changed = {"torch": "2.14.0", "setting": {}, "plan": {"rms_norm": "stock"}}
    assert lock_differences(LOCKED, FACTS | changed) == [
        "setting prefer is nothing; the lock has vendor",
        "torch is 2.14.0; the lock has 2.13.0",
    ], "the plan follows from the others"
    assert lock_differences(LOCKED, FACTS | {"plan": {"rms_norm": "stock"}}) == [
        "plan rms_norm is stock; the lock has vendor.acme"
    ]
    any_model = {name: FACTS[name] for name in ("torch", "setting")}
    assert lock_differences(LOCKED, any_model) == []
    many = lock_differences(LOCKED, FACTS | {"argument": {str(n): n for n in range(20)}})
    assert len(many) == 13 and many[-1] == "and 10 more"


def lock_of(tmp_path: Path, rank: int, by_rank: list[list[str]], mode: str = "") -> Lock:
    """The lock of a rank's engine; the ranks find these differences."""
    path = tmp_path / "vllm-fl.lock"
    path.write_text(json.dumps({MARK: VERSION, "facts": FACTS, "result": {}, "seed": 7}))
    settings = load_settings({"VLLM_FL_LOCK": f"{mode}{path}"})
    facts = SimpleNamespace(settings=settings)
    engine: Any = SimpleNamespace(facts=facts, rank=rank, gather=lambda what, mine: by_rank)
    return Lock(engine, engine.facts.settings.locked, FACTS)


@pytest.mark.parametrize(("remark", "verdict"), [(VERIFIED_BEFORE, "kept"), ("seed 7", "fresh")])
def test_a_lock_records_whether_a_verdict_was_kept(remark: str, verdict: str) -> None:
    remarks, plan = {Moment.PLANNED: [remark]}, SimpleNamespace(entries={})
    engine: Any = SimpleNamespace(disabled={}, plan=plan, digest="f00d", remarks=remarks, state={})
    locked: Any = None
    assert Lock(engine, locked, FACTS).to_json()["result"]["verdict"] == verdict


def test_all_ranks_end_with_the_differences_of_each(tmp_path: Path) -> None:
    lock_of(tmp_path, 0, [[], []]).compare_facts()
    by_rank = [["torch is 1"], ["torch is 1", "nccl is 3"]]
    for rank in (0, 1):
        with pytest.raises(LockError) as ended:
            lock_of(tmp_path, rank, by_rank).compare_facts()
        assert ended.value.differences == ("torch is 1", "rank 1: nccl is 3")
        assert "\n  rank 1: nccl is 3" in str(ended.value)
        travelled = pickle.loads(pickle.dumps(ended.value))  # as from a Ray worker
        assert str(travelled) == str(ended.value)
        assert travelled.differences == ended.value.differences


def test_another_class_of_quantised_layers_differs(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, 0, [[]])
    rows = [{"op": "int8_linear", "class": "CPUInt8", "layers": 8}]
    vars(lock.engine).update(state={LinearKernels: rows}, digest="f00d")
    vars(lock.engine)["plan"] = SimpleNamespace(entries={}, number=1)
    result = {"ops": {}, "digest": "f00d", "kernels": {"int8_linear": {"Int8": 8}}}
    vars(lock.engine.facts.settings.locked)["result"] = result
    with pytest.raises(LockError) as ended:
        lock.compare_plan()
    assert ended.value.differences == (
        "class of int8_linear CPUInt8 is 8; the lock has nothing",
        "class of int8_linear Int8 is nothing; the lock has 8",
    )


def test_the_first_rank_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm_fl"), "propagate", True)
    for rank in (0, 1):
        lock = lock_of(tmp_path, rank, [["torch is 1"], []], "warn:")
        lock.compare_facts()
        assert lock.differs == ["torch is 1"]
    (record,) = [record for record in caplog.records if "[FL505]" in record.getMessage()]
    assert "torch is 1" in record.getMessage()
