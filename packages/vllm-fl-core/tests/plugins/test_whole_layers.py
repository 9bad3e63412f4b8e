"""Whole layers from plugins: the values, the plan and the digest."""

from __future__ import annotations

from typing import Any

import pytest
from builders import managing, planning, silu

from vllm_fl.engine.start_line import line, notes
from vllm_fl.plugins.types import BackendImplKind, LayerImpl, OpImpl

VENDOR = BackendImplKind.VENDOR
ROW = "RowParallelLinear"


def row(path: str = "acme.linear.Row", vendor: str = "acme", **fields: Any) -> LayerImpl:
    return LayerImpl(ROW, path, VENDOR, vendor, **fields)


def test_ids_and_names() -> None:
    assert (row().impl_id, row().op_name, row().priority) == ("vendor.acme", ROW, 100)
    assert row(impl_id="vendor.acme").impl_id == "vendor.acme"
    other = LayerImpl(ROW, "a.B", BackendImplKind.REFERENCE, impl_id="reference.acme")
    assert (other.impl_id, other.priority) == ("reference.acme", 50)
    with pytest.raises(ValueError, match="an identifier such as 'rms_norm'"):
        OpImpl(ROW, "vendor.zeta", VENDOR, print, "zeta")
    with pytest.raises(ValueError, match="a class name such as 'RowParallelLinear'"):
        LayerImpl("rms_norm", "a.B", VENDOR, "acme")


@pytest.mark.parametrize(
    ("arguments", "fields", "words"),
    [
        ((ROW, "a.B", VENDOR), {}, "needs vendor"),
        ((ROW, "a.B", VENDOR, "acme"), {"impl_id": "vendor.zeta"}, "must be 'vendor.acme'"),
        ((ROW, "a.B", BackendImplKind.REFERENCE, "acme"), {"impl_id": "x"}, "kind VENDOR only"),
        (("", "a.B", VENDOR, "acme"), {}, "class name"),
        ((ROW, "Row", VENDOR, "acme"), {}, r"module\.Class"),
        ((ROW, "a.B", "vendor", "acme"), {}, "BackendImplKind"),
        ((ROW, "a.B", VENDOR, "acme", "high"), {}, "priority must be an int"),
        ((ROW, "a.B", VENDOR, "acme"), {"supports": True}, "supports must be callable"),
        ((ROW, "a.B", VENDOR, "acme"), {"available": "yes"}, "available must be callable"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: Any, fields: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        LayerImpl(*arguments, **fields)


def test_the_plan_has_them_behind_the_ops_and_says_that_they_are_not_verified() -> None:
    plan = planning(managing(row(), silu("vendor.acme")))
    entry = plan.entries[ROW]
    assert (entry.label, entry.reason, entry.impls) == ("vendor.acme", "the order lists vendor", ())
    assert {name: impl.impl_id for name, impl in plan.layers.items()} == {ROW: "vendor.acme"}
    assert plan.is_stock(ROW), "nothing of it is bound to a layer of ours"
    text = line(plan)
    assert "2 ops planned" in text and f"{ROW}=vendor.acme" in text
    assert notes(plan) == [f"whole layers, not verified: {ROW}"]
    assert notes(planning(managing(silu("vendor.acme")))) == []


def test_the_policys_orders_hold_for_layers_too() -> None:
    reference = LayerImpl(ROW, "a.B", BackendImplKind.REFERENCE, impl_id="reference.acme")
    two = (row(), row(vendor="zeta", priority=120), reference)

    def chosen(**policy: Any) -> str:
        return planning(managing(*two, **policy)).entries[ROW].label

    assert chosen() == "vendor.zeta"
    assert chosen(deny_vendors=["zeta"]) == "vendor.acme"
    assert chosen(deny_vendors=["zeta", "acme"]) == "stock"
    assert chosen(prefer="reference") == "reference.acme"
    assert chosen(per_op_order={ROW: ["vendor:acme", "stock"]}) == "vendor.acme"
    assert chosen(per_op_order={ROW: ["stock"]}) == "stock"
    assert chosen(per_op_order={ROW.lower(): ["stock"]}) == "vendor.zeta", "names are exact"
    gone = {(ROW, "vendor.zeta"): "does not support this engine: no"}
    entry = planning(managing(*two), demoted=gone).entries[ROW]
    assert entry.label == "vendor.acme"
    noted = planning(managing(*two), notes={ROW: "oot_blacklist lists it"}).entries[ROW]
    assert (noted.label, noted.reason) == ("stock", "oot_blacklist lists it")
