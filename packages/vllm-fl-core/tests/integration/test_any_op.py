"""Core needs only an op's binding to plan it; tested with a third-party op."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm.platforms
from builders import silu
from configs import engine_config

import vllm_fl.dispatch
from vllm_fl.contracts.binding import Binding, Contract, LayerTarget, OperatorTarget
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.engine.plan import PlanEntry
from vllm_fl.integration.patchers import layers
from vllm_fl.integration.planning import facts_of, plan_for
from vllm_fl.plugins.plugin import Owner
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.types import BackendImplKind, OpImpl

SPEC = import_module("sample_contracts.greedy_token").SPEC
OP = SPEC.name
TARGET = OperatorTarget("acme::greedy", ("out", "logits"), lambda op: op, lambda own: own)

Entries = Callable[..., dict[str, PlanEntry]]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Entries:
    """`entries(needs=(...))`: the plan of an engine with such a binding for the op."""
    monkeypatch.setattr(layers, "foreign_ops", dict)
    platform = SimpleNamespace(vllm_fl_platform="cuda", device_type="cuda")
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)

    def greedy_token(logits: Any) -> Any:
        return logits.argmax(-1)

    def planned(config: Any = None, **binding: Any) -> dict[str, PlanEntry]:
        registry = OpRegistry()
        bound = Binding(**{"targets": (TARGET,), **binding})
        registry.add_contract(Contract(SPEC), bound, Owner("acme"))
        vendor = BackendImplKind.VENDOR
        mine = OpImpl(OP, "vendor.acme", vendor, greedy_token, "acme")
        registry.register_many([mine, silu("vendor.acme")])
        monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", OpManager(registry))
        found = plan_for(facts_of(engine_config() if config is None else config)).entries
        return {op: found[op] for op in (OP, "silu_and_mul")}

    return planned


def test_it_is_planned_where_nothing_speaks_against_it(entries: Entries) -> None:
    needs = ("vllm.config.model:ModelConfig.get_head_size", "vllm.config:VllmConfig")
    found = entries(needs=needs, shared=("vllm.envs:environment_variables",))
    assert {entry.label for entry in found.values()} == {"vendor.acme"}


@pytest.mark.parametrize(
    "binding",
    [
        {"needs": ("vllm.config.model:ModelConfig.no_such",)},
        {"needs": ("vllm.no_such:Name",)},
        {"shared": ("vllm.config.model:NO_SUCH",)},
    ],
)
def test_a_name_that_this_vllm_lacks_costs_the_op_alone(entries: Entries, binding: Any) -> None:
    found = entries(**binding)
    ((name,),) = binding.values()
    assert found[OP].label == "stock"
    assert found[OP].note == f"this vLLM has no {name}, which its targets need"
    assert found["silu_and_mul"].label == "vendor.acme"


def test_an_op_without_a_place_is_no_fault_of_this_vllm(entries: Entries) -> None:
    assert entries(targets=())[OP].note == "vLLM has no target for it"
    absent = LayerTarget("vllm.no_such.Layer", lambda layer: layer)
    assert entries(targets=(absent,))[OP].note == "this vLLM has no target for it"


def test_layers_that_models_share_are_forgotten(
    entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"size 8": object()}
    monkeypatch.setattr(vllm.platforms, "KEPT", kept, raising=False)
    entries(shared=("vllm.platforms:KEPT", "vllm.platforms:NO_SUCH"))
    layers.forget_shared_layers()
    assert kept == {}
