"""The registry: all or nothing, both owners of duplicates, parameters match the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import silu

from vllm_fl.errors import PluginError
from vllm_fl.plugins.plugin import Owner
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.policy import SelectionPolicy, Selector

ACME = Owner("acme", "vllm-fl-acme", "1.0", "/site/acme")
BETA = Owner("beta", "vllm-fl-beta", "2.0", "/site/beta")


def test_snapshots_are_read_only_and_stand() -> None:
    registry = OpRegistry()
    registry.register_impl(silu("vendor.acme"), ACME)
    before = registry.snapshot()
    with pytest.raises(TypeError):
        before.impls_by_op["silu_and_mul"] = ()  # type: ignore[index]
    with pytest.raises(TypeError):
        del before.owners["silu_and_mul", "vendor.acme"]  # type: ignore[attr-defined]
    registry.register_impl(silu("default.flagos"), BETA)
    assert [i.impl_id for i in before.impls_by_op["silu_and_mul"]] == ["vendor.acme"]
    after = registry.snapshot()
    assert [i.impl_id for i in after.impls_by_op["silu_and_mul"]] == [
        "default.flagos",
        "vendor.acme",
    ]
    assert after.owners["silu_and_mul", "default.flagos"] == BETA


def test_one_refused_refuses_all_of_the_call_and_a_duplicate_names_both_owners() -> None:
    registry = OpRegistry()
    registry.register_impl(silu("vendor.acme"), ACME)
    before = registry.snapshot()
    with pytest.raises(PluginError) as caught:
        registry.register_many([silu("default.flagos"), silu("vendor.acme")], BETA)
    error = caught.value
    assert (error.op, error.impl, error.plugin) == ("silu_and_mul", "vendor.acme", "beta")
    assert error.distribution == "vllm-fl-beta 2.0"
    for fact in ("vllm-fl-acme 1.0", "/site/acme", "vllm-fl-beta 2.0", "/site/beta"):
        assert fact in str(error)
    with pytest.raises(PluginError, match=r"Use a different id\."):
        registry.register_many([silu("default.flagos"), silu("default.flagos")], BETA)
    with pytest.raises(PluginError, match="expected OpImpl"):
        registry.register_many([silu("default.flagos"), "silu"], BETA)  # type: ignore[list-item]

    def breaking() -> Any:
        yield silu("default.flagos")
        raise OSError("libacme.so")

    with pytest.raises(OSError):
        registry.register_many(breaking(), BETA)
    assert registry.snapshot() is before


def with_more(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda y: y, "(y)"),
        (with_more, "(x, eps)"),
        (lambda x=None: x, "(x=None)"),
        (lambda: None, "()"),
    ],
)
def test_parameters_must_be_the_contracts(fn: Any, words: str) -> None:
    for what, impl in (
        ("fn", silu("vendor.acme", fn=fn)),
        ("supports", silu("vendor.acme", supports=fn)),
    ):
        with pytest.raises(PluginError) as caught:
            OpRegistry().register_impl(impl, ACME)
        assert f"its {what} takes {words}, but the contract has (x)" in str(caught.value)
        assert (caught.value.op, caught.value.impl) == ("silu_and_mul", "vendor.acme")


def test_fields_without_effect_for_a_layer_are_refused() -> None:
    for field in ({"supports": lambda x: True}, {"takes": ()}):
        with pytest.raises(ValueError, match="would have no effect"):
            silu("vendor.acme", fn=lambda self, x: x, **field)


def test_remove_and_clear() -> None:
    registry = OpRegistry()
    registry.register_impl(silu("vendor.acme"), ACME)
    registry.register_impl(silu("default.flagos"), BETA)
    registry.remove(ACME)
    assert set(registry.snapshot().owners) == {("silu_and_mul", "default.flagos")}
    registry.remove(BETA)
    assert dict(registry.snapshot().impls_by_op) == {}
    registry.register_impl(silu("vendor.acme"), ACME)
    registry.clear()
    assert dict(registry.snapshot().owners) == {}


def test_a_vendor_that_differs_from_its_id_in_case_alone_is_taken_and_deprecated() -> None:
    named = (BackendImplKind.VENDOR, lambda x: x, "CUDA")
    with pytest.warns(DeprecationWarning, match=r"vendor='CUDA' .* write 'cuda'"):
        impl = OpImpl("silu_and_mul", "vendor.cuda", *named)
    assert (impl.impl_id, impl.vendor) == ("vendor.cuda", "CUDA")
    for name in ("cuda", "CUDA"):
        assert Selector("vendor", name).matches(impl)
        assert SelectionPolicy(deny_vendors=frozenset({name})).refuses(impl)
        assert SelectionPolicy(allow_vendors=frozenset({name})).refuses(impl) is None
    assert SelectionPolicy(allow_vendors=frozenset({"Cuda"})).refuses(impl)
    with pytest.raises(ValueError, match=r"a vendor's impl_id must be 'vendor\.CUDA'"):
        OpImpl("silu_and_mul", "vendor.rocm", *named)
