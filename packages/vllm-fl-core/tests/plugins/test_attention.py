"""Attention backends: candidates that are a class, in the plan next to the ops."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from builders import managing, planning

from vllm_fl.engine.start_line import line
from vllm_fl.integration.patchers.classes import class_of, class_refusal
from vllm_fl.plugins.signatures import from_older_form
from vllm_fl.plugins.types import (
    ATTENTION,
    AttentionImpl,
    AttentionRequest,
    BackendImplKind,
    OpImpl,
)

VENDOR = BackendImplKind.VENDOR
PLAIN = AttentionRequest(head_size=64, dtype="bfloat16")
MLA = AttentionRequest(head_size=576, dtype="bfloat16", use_mla=True)


def acme(class_path: Any = "json.JSONDecoder", **fields: Any) -> AttentionImpl:
    return AttentionImpl("vendor.acme", class_path, VENDOR, "acme", **fields)


def older(fn: Any, **fields: Any) -> AttentionImpl:
    return from_older_form(OpImpl("attention_backend", "vendor.acme", VENDOR, fn, "acme", **fields))


def path_of(impl: AttentionImpl, request: AttentionRequest) -> str:
    return class_of(impl, ATTENTION, request, lambda path, cls: "")[0]


@pytest.mark.parametrize(
    ("supports", "expected"),
    [
        (None, None),
        (lambda request: True, None),
        (lambda request: "no MLA", "no MLA"),
        (lambda request: False, "its supports returned neither True nor a reason"),
        (lambda request: {}["block_size"], "its supports raised KeyError: 'block_size'"),
        (lambda request: sys.exit(3), "its supports raised SystemExit: 3"),
    ],
)
def test_what_a_backend_says_to_a_request(supports: Any, expected: str | None) -> None:
    assert class_refusal(acme(supports=supports), ATTENTION, PLAIN) == expected


def test_the_class_may_depend_on_the_request() -> None:
    impl = acme(lambda request: "acme.Mla" if request.use_mla else "acme.Plain")
    assert path_of(impl, PLAIN) == "acme.Plain"
    assert path_of(impl, MLA) == "acme.Mla"
    assert path_of(acme("acme.Plain"), MLA) == "acme.Plain"


def both(use_mla: bool = False, use_sparse: bool = False) -> str:
    return f"acme.{'Mla' if use_mla else 'Plain'}{'Sparse' if use_sparse else ''}"


@pytest.mark.parametrize("fn", [both, lambda use_mla: both(use_mla), lambda **asked: both(**asked)])
def test_the_older_form_is_asked_what_it_takes(fn: Any) -> None:
    impl = older(fn, priority=7, available=lambda: "no such chip")
    assert path_of(impl, MLA) == "acme.Mla"
    assert path_of(impl, PLAIN) == "acme.Plain"
    assert (impl.impl_id, impl.vendor, impl.priority) == ("vendor.acme", "acme", 7)
    assert impl.availability() == "no such chip"
    of_a_layer = older(lambda self, use_mla=False: "acme.Plain")
    assert "needs a layer" in str(of_a_layer.availability())


def test_the_plan_names_the_backend_and_counts_it() -> None:
    plan = planning(managing(acme()))
    entry = plan.entries["attention_backend"]
    assert (entry.label, entry.reason) == ("vendor.acme", "the order lists vendor")
    assert [i.impl_id for i in entry.classes(AttentionImpl)] == ["vendor.acme"]
    assert entry.impls == ()  # nothing to call or verify before startup
    assert line(plan).startswith("vllm-fl: 1 op planned:")
    assert "attention_backend=vendor.acme" in line(plan)


def test_a_backend_that_is_out_leaves_stock_with_the_reason() -> None:
    out = {("attention_backend", "vendor.acme"): "does not support this model: no MLA"}
    entry = planning(managing(acme()), demoted=out).entries["attention_backend"]
    assert entry.label == "stock"
    why = "default, no order for this op"
    assert entry.reason == f"{why} (vendor.acme: does not support this model: no MLA)"
