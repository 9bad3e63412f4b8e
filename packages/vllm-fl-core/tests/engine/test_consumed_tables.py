"""Consumed arguments that are not activations: the paged caches of attention."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

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


def faults(function: Callable[..., Any], consumes: frozenset[str]) -> list[str]:
    impl = OpImpl(
        "reshape_and_cache", "vendor.acme", BackendImplKind.VENDOR, function, "acme",
        consumes=consumes,
    )  # fmt: skip
    found = find_faults(Request([Role(impl)], torch.float32, CPU, SIZES, seed=0, calls=40))
    return [each.reason for each in found.objections.values()]


def test_each_call_is_given_the_caches_as_they_were_first() -> None:
    assert not faults(in_place, BOTH)


def test_a_cache_that_is_overwritten_undeclared_is_a_fault() -> None:
    (why,) = faults(in_place, frozenset({"key_cache"}))
    assert "'value_cache'" in why


def test_what_is_written_beside_a_consumed_cache_is_a_fault() -> None:
    (why,) = faults(beside, BOTH)
    assert "outside its arguments" in why


def test_a_callers_cache_is_copied_for_who_writes_into_it_and_its_copy_is_contiguous() -> None:
    impl = OpImpl(SPEC.name, "vendor.acme", BackendImplKind.VENDOR, in_place, "acme", consumes=BOTH)
    record = Record(logging.getLogger(__name__))
    plain = call_guard(Chain(SPEC.name, ((None, (impl,)),), SPEC, False, record))
    granted = call_guard(Chain(SPEC.name, ((None, (impl,)),), SPEC, False, record, BOTH))
    sample = next(s for s in SPEC.samples(torch.float32, CPU) if s.name.startswith("heads before"))
    before = [arg.clone() for arg in sample.args]
    for result, want in zip(plain(*sample.args), SPEC.oracle(*sample.args), strict=True):
        assert result.is_contiguous() and torch.equal(result, want)
    assert all(torch.equal(a, b) for a, b in zip(sample.args, before, strict=True))
    assert granted(*sample.args)[0] is sample.args[2]
