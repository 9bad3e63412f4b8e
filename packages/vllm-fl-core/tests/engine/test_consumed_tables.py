"""Consumed arguments that are not activations: the paged caches of attention."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_fl.dispatch.chain import Chain
from vllm_fl.dispatch.guard import call_guard
from vllm_fl.dispatch.record import Record
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl_ops.contracts.rules import typical_sizes
from vllm_fl_verify.preflight import find_faults
from vllm_fl_verify.trials import Request, Role

CPU = torch.device("cpu")
SPEC = known_contracts().contracts["reshape_and_cache"]
BOTH = frozenset({"key_cache", "value_cache"})
SIZES = dataclasses.replace(typical_sizes(), kv_heads=2, head_size=8, tokens=(1, 40))


def in_place(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> Any:
    kept = slot_mapping >= 0
    at = slot_mapping[kept] // key_cache.shape[1], slot_mapping[kept] % key_cache.shape[1]
    key_cache[at], value_cache[at] = key[kept], value[kept]
    return key_cache, value_cache


def beside(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> Any:
    """Also write one element after the end of the values' storage."""
    at = value_cache.as_strided((1,), (1,), value_cache[-1, -1, -1, -1:].storage_offset() + 1)
    at.fill_(1.0)
    return in_place(key, value, key_cache, value_cache, slot_mapping)


def impl(function: Callable[..., Any], consumes: frozenset[str]) -> OpImpl:
    vendor = BackendImplKind.VENDOR
    return OpImpl(SPEC.name, "vendor.acme", vendor, function, "acme", consumes=consumes)


def faults(function: Callable[..., Any], consumes: frozenset[str]) -> list[str]:
    role = Role(impl(function, consumes))
    found = find_faults(Request([role], torch.float32, CPU, SIZES, seed=0, calls=40))
    return [each.reason for each in found.objections.values()]


@pytest.mark.parametrize(
    ("function", "consumes", "fault"),
    [
        (in_place, BOTH, None),  # each call has the caches as they were first
        (in_place, frozenset({"key_cache"}), "'value_cache'"),
        (beside, BOTH, "outside its arguments"),
    ],
)
def test_only_consumed_caches_may_be_overwritten(
    function: Any, consumes: frozenset[str], fault: str | None
) -> None:
    found = faults(function, consumes)
    assert len(found) == (fault is not None) and all(str(fault) in why for why in found)


def test_a_callers_cache_is_copied_for_who_writes_into_it_and_its_copy_is_contiguous() -> None:
    chain = SPEC.name, ((None, (impl(in_place, BOTH),)),), SPEC, False, Record(logging.getLogger())
    plain, granted = call_guard(Chain(*chain)), call_guard(Chain(*chain, BOTH))
    sample = next(s for s in SPEC.samples(torch.float32, CPU) if s.name.startswith("heads before"))
    before = [arg.clone() for arg in sample.args]
    for result, want in zip(plain(*sample.args), SPEC.oracle(*sample.args), strict=True):
        assert result.is_contiguous() and torch.equal(result, want)
    assert all(torch.equal(a, b) for a, b in zip(sample.args, before, strict=True))
    assert granted(*sample.args)[0] is sample.args[2]
