"""Classes for quantised linear layers: their declaration, ids and orders, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from builders import managing, planning

from vllm_fl.engine.facts import EngineFacts
from vllm_fl.errors import PluginError
from vllm_fl.integration.targets import planned_for_nothing
from vllm_fl.plugins.types import BackendImplKind, LinearKernelImpl
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.policy import Selector

VENDOR = BackendImplKind.VENDOR


def acme(scheme: str = "int8", path: str = "acme.linear.Int8", **fields: Any) -> LinearKernelImpl:
    return LinearKernelImpl(scheme, path, VENDOR, "acme", **fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"scheme": "int3"}, "unknown scheme; expected fp8 or fp8_block"),
        ({"path": "Int8"}, "class_path must be 'module.Class'"),
        ({"impl_id": "vendor.other"}, "impl_id must be 'vendor.acme'"),
    ],
)
def test_a_wrong_declaration_is_an_error(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        acme(**fields)


def test_ids_of_vllms_classes_are_reserved_and_selected_without_a_prefix() -> None:
    impl = LinearKernelImpl("int8", "a.B", BackendImplKind.DEFAULT, impl_id="vllm.B")
    with pytest.raises(PluginError, match=r"'vllm\.' are reserved for vLLM's implementation"):
        managing(impl)
    assert Selector.parse("vllm.A") == Selector("impl", "vllm.A")
    with pytest.raises(ValueError, match="Did you mean 'stock'"):
        Selector.parse("vllm")


@pytest.mark.parametrize(
    ("order", "planned"),
    [
        ("vendor|stock", ["vendor.acme"]),
        ("impl:vllm.B|reference|vllm.A|vendor|stock", ["vllm.B", "vllm.A", "vendor.acme"]),
        ("stock|impl:vllm.A", []),
        ("impl:vllm.|vendor|stock", ["vllm.", "vendor.acme"]),  # rejected with vLLM's classes
    ],
)
def test_an_order_contains_vllms_classes_by_id(order: str, planned: list[str]) -> None:
    """Only the id selects such a class: `reference` before it does not change its position."""
    plan = planning(managing(acme(), per_op_order={"int8_linear": order}))
    found = plan.entries["int8_linear"].classes(LinearKernelImpl)
    assert [impl.impl_id for impl in found] == planned


def test_without_an_order_a_vendors_class_precedes_vllms() -> None:
    assert (acme().op_name, acme().impl_id) == ("int8_linear", "vendor.acme")
    plan = planning(managing(acme()))
    assert plan.entries["int8_linear"].label == "vendor.acme"
    assert "fp8_linear" not in plan.entries


def test_a_class_for_a_scheme_that_the_model_lacks_is_unused() -> None:
    facts = EngineFacts(load_settings({}), "eager", absent=frozenset({"int8_linear"}))
    plan = planning(managing(acme(), per_op_order={"int8_linear": "vendor"}))
    assert planned_for_nothing(plan, facts).keys() == {"int8_linear"}
