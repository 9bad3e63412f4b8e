"""What a verification has tried is tried again under a lock, however fast the machine is."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import silu
from torch import Tensor

from vllm_fl.contracts import ModelSizes
from vllm_fl.engine import determinism, preflight
from vllm_fl.engine.preflight import find_faults
from vllm_fl.engine.trials import Request, Role
from vllm_fl.engine.tries import Tried

SIZES = ModelSizes(64, 96, 4, 2, 16, 16, tokens=(1, 700))
CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that goes on by `step` seconds whenever somebody looks at it."""
    state = SimpleNamespace(now=0.0, step=0.0)

    def monotonic() -> float:
        state.now += state.step
        return float(state.now)

    for module in (preflight, determinism):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    return state


def verified(tried: Tried) -> list[str]:
    """Every tensor that an implementation is given, by its shape and bits."""
    seen: list[str] = []

    def noting(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.uint8).numpy().tobytes()
        seen.append(f"{tuple(x.shape)} {hashlib.sha256(bits).hexdigest()}")
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]

    role = Role(silu("vendor.acme", fn=noting), warm=(1, 5, 700, 699))
    request = Request(
        [role], torch.bfloat16, CPU, SIZES, seed=7, tried=tried, requires="batch_invariant"
    )
    found = find_faults(request)
    assert not found.objections
    return seen


def test_the_same_tensors_however_time_goes(clock: SimpleNamespace) -> None:
    clock.step = 0.15
    first = Tried()
    seen = verified(first)
    told: dict[str, Any] = json.loads(json.dumps(first.made))
    (lists,) = told["silu_and_mul=vendor.acme, bfloat16"]
    assert lists["samples"] and lists["counts"] and lists["further counts"]
    assert lists["ended early"], "time has run out, or the test shows nothing"
    for step in (0.0, 100.0):
        clock.step = step
        again = Tried(told)
        assert verified(again) == seen and again.made == told
        assert verified(Tried()) != seen


def test_what_a_lock_does_not_have_is_decided_by_time() -> None:
    tried = Tried({"here": [{"counts": [1]}]})
    here, there = tried.of("here"), tried.of("there")
    assert here.takes("counts", 1, usual=False) and not here.takes("counts", 2)
    assert there.takes("counts", 2) and not there.takes("counts", 1, usual=False)
    assert tried.of("here").takes("counts", 2), "a further run of it"
    assert tried.made == {
        "here": [{"counts": [1]}, {"counts": [2]}],
        "there": [{"counts": [2]}],
    }
