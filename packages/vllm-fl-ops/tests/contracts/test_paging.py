"""Contracts of paged caches and of merged attention: wrong forms of them, and their slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_fl.contracts import contracts
from vllm_fl_ops.contracts.paging import blocks_for, slots
from vllm_fl_verify.verification import misplaced

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Op = Callable[..., Any]


@pytest.mark.parametrize("capacity", [1, 2, 8, 20, 48, 320])
def test_slots_are_tokens_own_scattered_and_below_the_capacity(capacity: int) -> None:
    found = slots(capacity, capacity, CPU)
    assert sorted(found.tolist()) == list(range(capacity))
    assert capacity < 8 or found.tolist() != sorted(found.tolist())
    skipping = slots(capacity, capacity, CPU, skipped=3)
    assert (skipping < 0).nonzero().flatten().tolist() == list(range(2, capacity, 3))


def test_a_sample_has_a_block_to_spare() -> None:
    assert all(blocks_for(tokens) * 16 > tokens for tokens in (1, 300, 319, 320, 8192))
    assert blocks_for(1) == blocks_for(256)


@pytest.mark.parametrize("op", ["reshape_and_cache", "concat_and_cache_mla"])
def test_a_slot_beyond_the_cache_is_the_callers_mistake(op: str) -> None:
    spec = contracts()[op]
    sample = next(s for s in spec.samples(torch.float32, CPU) if s.name == "16 tokens")
    assert spec.check(*sample.args) is None
    beyond = sample.args[-1].clone()
    beyond[3] = 48
    verdict = spec.check(*sample.args[:-1], beyond)
    assert verdict is not None and verdict[0] == "slot_mapping"
    meta = [arg.to("meta") for arg in (*sample.args[:-1], beyond)]
    assert spec.check(*meta) is None


def test_both_caches_come_back_as_they_are_laid_out() -> None:
    """What an implementation has written in place is its result, whatever the layout."""
    from vllm_fl_verify.guarded import guarded

    spec = contracts()["reshape_and_cache"]
    for sample in spec.samples(torch.float32, CPU):
        call = guarded(dict(zip(spec.parameters, sample.args, strict=True)))
        result = (call.arguments["key_cache"], call.arguments["value_cache"])
        shapes = spec.fake(*call.args)
        assert not misplaced(result, shapes, call, {"key_cache", "value_cache"})
        assert "shares memory with" in misplaced(result, shapes, call, ())
