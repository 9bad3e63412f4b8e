"""Distributions with only contracts: which load, and what their failure means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import found, planning, spec_of, started

from vllm_fl.contracts.binding import Contract
from vllm_fl.errors import PluginError
from vllm_fl.plugins.discovery import BACKENDS
from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.reserved import FL_OPS
from vllm_fl.plugins.snapshot import EMPTY
from vllm_fl.plugins.types import BackendImplKind, OpImpl


def bringing(*ops: str) -> Any:
    return SimpleNamespace(contracts=hookimpl(lambda: [Contract(spec_of(op)) for op in ops]))


def backend(distribution: str | None, op: str) -> Plugin:
    impl = OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, lambda x: x, "acme")
    return found(distribution, SimpleNamespace(register_ops=hookimpl(lambda: [impl])), "backend")


@pytest.mark.parametrize(
    ("only", "loaded"),
    [
        (None, ["fl-acme", "fl-acme-ops", "fl-other", FL_OPS]),
        ([], []),
        (["FL_acme"], ["fl-acme", "fl-acme-ops", FL_OPS]),
        (["fl-absent"], ["fl-acme-ops", FL_OPS]),
    ],
)
def test_contracts_come_along_with_any_name_and_nothing_else_is_imported(
    only: list[str] | None, loaded: list[str]
) -> None:
    def data(name: str, op: str) -> Plugin:
        return found(name, bringing(op) if name in loaded else None)

    every = [
        backend("fl-acme", "acme"),
        data("fl-acme-ops", "acme_op"),
        backend("fl-other", "other") if "fl-other" in loaded else found("fl-other", kind="backend"),
        data(FL_OPS, "rms_norm"),
    ]
    registry = OpRegistry(EMPTY)
    plugins = load(registry, every, only=only)
    assert [p.owner.distribution for p in plugins if p.status == "ok"] == loaded
    assert {p.status for p in plugins} <= {"ok", "disabled"}
    assert [*registry.snapshot().contracts] == (["acme_op", "rms_norm"] if loaded else [])


def test_a_module_that_the_user_names_has_the_ops_too() -> None:
    registry = OpRegistry(EMPTY)
    load(registry, [backend(None, "rms_norm"), found(FL_OPS, bringing("rms_norm"))], only=[])
    assert [*registry.snapshot().contracts] == ["rms_norm"]


def test_what_brings_more_than_contracts_is_no_data() -> None:
    more = bringing("acme_op")
    more.register_ops = hookimpl(lambda: [])
    registry = OpRegistry(EMPTY)
    (plugin,) = load(registry, [found("fl-acme-ops", more)])
    assert plugin.status == "failed" and not registry.snapshot().contracts
    assert f"implements contracts, register_ops; use the group {BACKENDS}" in str(plugin.error)


@pytest.mark.parametrize("kind", ["contracts", "backend"])
@pytest.mark.parametrize("distribution", ["fl-acme", None])
def test_a_contract_of_vllm_fl_ops_stays_and_its_namesake_is_refused(
    distribution: str | None, kind: Any
) -> None:
    stranger = found(distribution, bringing("rms_norm", "acme_op"), kind)
    registry = OpRegistry(EMPTY)
    mine, ours = load(registry, [stranger, found(FL_OPS, bringing("rms_norm"))])
    assert (mine.status, ours.status) == ("failed", "ok")
    why = f"the contract of op 'rms_norm' rejected: also provided by {FL_OPS} 1.0"
    assert why in str(mine.error)
    authors = registry.snapshot().authors
    assert {op: owner.label for op, owner in authors.items()} == {"rms_norm": FL_OPS}


@pytest.mark.parametrize(
    ("op", "broken", "distribution", "words"),
    [
        ("acme_op", ImportError("no such file"), "fl-acme-ops 1.0", "Reinstall it"),
        ("acme_op", bringing("a", "not a name"), "fl-acme-ops 1.0", "Reinstall it"),
        ("silu_and_mul", None, FL_OPS, f"{FL_OPS} is not installed: pip install {FL_OPS}"),
    ],
)
def test_an_implementation_without_its_contract_ends_the_startup(
    op: str, broken: Any, distribution: str, words: str
) -> None:
    others = [found("fl-acme-ops", broken)] if broken else []
    registry = OpRegistry(EMPTY)
    manager = started(registry, load(registry, [backend("fl-acme", op), *others]))
    for use in (lambda: planning(manager), lambda: manager.call(op, torch.ones(2))):
        with pytest.raises(PluginError) as caught:
            use()
        assert (caught.value.op, caught.value.impl) == (op, "vendor.acme")
        assert caught.value.distribution == distribution
        lost = f"Op '{op}' has no contract to verify 'vendor.acme' of fl-acme 1.0"
        assert str(caught.value).startswith(lost) and words in str(caught.value)
