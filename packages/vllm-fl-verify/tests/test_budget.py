"""Trials depend only on seed and sizes; only the valve measures time."""

from __future__ import annotations

import gc
import hashlib
import logging

import pytest
import torch
from builders import silu
from of_acme import silu_and_mul
from torch import Tensor

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_verify.budget import Budget, Valve
from vllm_fl_verify.preflight import Findings, find_faults
from vllm_fl_verify.trials import Request, Role, Trials, without_old_objects

SIZES = ModelSizes(64, 96, 4, 2, 16, 16, tokens=(1, 700))
CPU = torch.device("cpu")


def verified(valve: Valve) -> tuple[Findings, list[str]]:
    """The findings, and every tensor passed to an implementation, by shape and bits."""
    seen: list[str] = []

    def noting(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.uint8).numpy().tobytes()
        seen.append(f"{tuple(x.shape)} {hashlib.sha256(bits).hexdigest()}")
        return silu_and_mul(x)

    role = Role(silu("vendor.acme", fn=noting), warm=(1, 5, 700, 699))
    found = find_faults(Request([role], torch.bfloat16, CPU, SIZES, seed=7, valve=valve))
    assert not found.objections
    return found, seen


def test_objects_that_vllm_has_frozen_remain_frozen() -> None:
    for prepare, is_frozen in (gc.freeze, True), (gc.unfreeze, False):
        prepare()
        with without_old_objects():
            assert gc.get_freeze_count()
        assert bool(gc.get_freeze_count()) is is_frozen


def test_a_seed_decides_what_is_tried_until_the_valve_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (_, first), (_, again) = verified(Valve()), verified(Valve())
    assert first == again and not caplog.records
    with caplog.at_level(logging.WARNING, "vllm_fl"):
        found, fewer = verified(Valve(seconds=-1.0))
    (record,) = caplog.records
    name = "silu_and_mul=vendor.acme"
    assert f"further batches of {name}, the warm-up of {name}" in record.getMessage()
    assert len(fewer) < len(first) and set(fewer) <= set(first)
    batches, warm = found.remarks
    assert batches == "fewer batches than usual: silu_and_mul of vendor.acme"
    assert warm.startswith("not warmed up at some sizes: ")


def test_calls_of_many_bytes_count_as_several() -> None:
    spec = known_contracts().contracts["silu_and_mul"]
    large = ModelSizes(intermediate=2**14, tokens=(1, 700))
    for device, at_700 in (("cpu", 43), ("meta", 1)):
        few, many = (
            Trials(spec, torch.bfloat16, torch.device(device), sizes, 0).forms[0].calls(700)
            for sizes in (SIZES, large)
        )
        assert few == 1 and int(many) == at_700


def test_the_last_call_may_count_as_more_than_are_left() -> None:
    budget = Budget(2.0, Valve())
    assert budget.takes("this", 1.5) and budget.takes("this", 1.5) and not budget.takes("this")
    assert not Budget(0, Valve()).takes("this", 0.0)
