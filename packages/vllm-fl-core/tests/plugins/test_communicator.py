"""Communicators are brought, registered and resolved like attention backends."""

from __future__ import annotations

from typing import Any

import pytest
from builders import managing

from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.loading import Found, load
from vllm_fl.plugins.registry import OpRegistry, Owner
from vllm_fl.plugins.types import BackendImplKind, CommunicatorImpl

VENDOR = BackendImplKind.VENDOR


def acme(path: Any = "acme.Communicator", **fields: Any) -> CommunicatorImpl:
    return CommunicatorImpl("vendor.acme", path, VENDOR, "acme", **fields)


class _Plugin:
    def __init__(self, *brought: Any) -> None:
        self.brought = brought

    @hookimpl
    def communicator(self) -> tuple[Any, ...]:
        return self.brought


def test_the_hook_brings_one() -> None:
    registry = OpRegistry()
    (plugin,) = load(registry, [Found(Owner("acme"), "acme", lambda: _Plugin(acme()))])
    assert (plugin.status, plugin.hooks) == ("ok", ("communicator",))
    assert registry.snapshot().find("communicator", "vendor.acme") is not None


def test_what_the_hook_returns_must_be_one() -> None:
    registry = OpRegistry()
    (plugin,) = load(registry, [Found(Owner("acme"), "acme", lambda: _Plugin("acme.Class"))])
    assert plugin.status == "failed" and "expected OpImpl, AttentionImpl, Comm" in str(plugin.error)


@pytest.mark.parametrize("path", ["Communicator", ".", "", 3])
def test_a_path_names_a_class_in_a_module(path: Any) -> None:
    with pytest.raises(ValueError, match=r"class_path must be 'module.Class'"):
        acme(path)


@pytest.mark.parametrize("name", ["available", "supports"])
def test_what_is_asked_must_be_callable(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be callable"):
        acme(**{name: True})


def test_stock_is_the_last_candidate_in_an_engine() -> None:
    trace = managing(acme()).trace("communicator", engine=True)
    assert [impl.impl_id for impl in trace.admitted] == ["vendor.acme", "stock.vllm"]
    assert [i.impl_id for i in managing().trace("communicator", engine=True).admitted] == [
        "stock.vllm"
    ]
