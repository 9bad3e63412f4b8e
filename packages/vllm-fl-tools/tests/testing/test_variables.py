"""Variables read by an implementation while a compiler traces it are declared, or reported."""

from __future__ import annotations

import os
from collections.abc import Callable
from os import environ
from typing import Any

import pytest
import torch
from of_acme import silu_and_mul as right

from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.setting import SettingSpec
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl_tools.testing.cases import CHECKS, failures


def reads(how: Callable[[], object]) -> Callable[[Any], Any]:
    """The op, in code that reads a variable first."""

    def silu_and_mul(x: Any) -> Any:
        how()
        return right(x)

    return silu_and_mul


def reasons(fn: Callable[[Any], Any], **options: Any) -> list[str]:
    """The check's result for an implementation."""
    vendor = BackendImplKind.VENDOR
    impl = OpImpl("silu_and_mul", "vendor.acme", vendor, fn, "acme", **options)
    others = CHECKS.keys() - {"tracing"}
    return [one.reason for one in failures(impl, without=others)]


WAYS = {
    "get": lambda: os.environ.get("ACME_FAST"),
    "getenv": lambda: os.getenv("ACME_FAST"),
    "in": lambda: "ACME_FAST" in environ,
    "bytes": lambda: os.environb.get(b"ACME_FAST"),
}


@pytest.mark.parametrize("how", WAYS)
def test_a_variable_that_nobody_declares_is_named(how: str) -> None:
    (first, *_) = reasons(reads(WAYS[how]), traceable=True)
    assert first.startswith("it reads the variable ACME_FAST while")


def test_one_that_is_declared_is_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = SettingSpec("acme_fast", "ACME_FAST", False)
    plugin = Plugin(Owner("acme"), "acme", status="ok", settings=(fast,))
    registry = get_default_manager().registry
    monkeypatch.setattr(registry, "plugins", (*registry.plugins, plugin))
    assert reasons(reads(WAYS["get"]), traceable=True) == []


def test_what_no_compiler_looks_into_reads_what_it_likes_each_time() -> None:
    assert reasons(reads(WAYS["get"])) == []


def test_what_torch_reads_is_not_the_implementations() -> None:
    assert reasons(reads(lambda: torch.utils._config_module), traceable=True) == []
