"""Contracts of paged caches: slots, and results in the caches' layouts."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ops.contracts.paging import slots
from vllm_fl_verify.verification import misplaced

CPU = torch.device("cpu")


@pytest.mark.parametrize("capacity", [1, 2, 8, 20, 48, 320])
def test_slots_are_tokens_own_scattered_and_below_the_capacity(capacity: int) -> None:
    found = slots(capacity, capacity, CPU)
    assert sorted(found.tolist()) == list(range(capacity))
    assert capacity < 8 or found.tolist() != sorted(found.tolist())
    skipping = slots(capacity, capacity, CPU, skipped=3)
    assert (skipping < 0).nonzero().flatten().tolist() == list(range(2, capacity, 3))


def test_both_caches_come_back_as_they_are_laid_out() -> None:
    """An implementation's in-place result is correct in any layout."""
    from vllm_fl_verify.guarded import guarded

    spec = known_contracts().contracts["reshape_and_cache"]
    for sample in spec.samples(torch.float32, CPU):
        call = guarded(dict(zip(spec.parameters, sample.args, strict=True)))
        result = (call.arguments["key_cache"], call.arguments["value_cache"])
        shapes = spec.fake(*call.args)
        assert not misplaced(result, shapes, call, {"key_cache", "value_cache"})
        assert "shares memory with" in misplaced(result, shapes, call, ())
