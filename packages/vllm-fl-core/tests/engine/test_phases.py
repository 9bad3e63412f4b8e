"""Duration of startup by phase: each second belongs to one phase."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from vllm_fl.engine.phases import phases_of


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
