"""What a start took, phase by phase: each second is in one of them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from vllm_fl.engine import phases as module
from vllm_fl.engine.phases import before_worker, phases_of


def test_an_inner_phase_is_no_part_of_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 4.0, 6.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    worker = SimpleNamespace()
    phases = phases_of(worker)
    with pytest.raises(RuntimeError), phases.during("outer"):
        with phases.during("inner"):
            pass
        with phases.during("inner"):
            raise RuntimeError
    assert phases.seconds == {"inner": 4.0, "outer": 6.0}
    assert phases_of(worker) is phases


@pytest.mark.parametrize(
    ("process", "until", "before"),
    [(5.0, 2.0, 5.0), (90.0, 0.0, 7.0)],
    ids=["a process of its own", "the one that made the configuration"],
)
def test_what_came_before_a_worker_adds_up(
    process: float, until: float, before: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 110.0)
    monkeypatch.setattr(module, "process_seconds", lambda: process)
    assert before_worker((100.0, 103.0)) == {
        "vLLM: the configuration": 3.0,
        "vLLM: until the worker's process": until,
        "the process before its worker": before,
    }
    assert before_worker(None) == {"the process before its worker": process}
