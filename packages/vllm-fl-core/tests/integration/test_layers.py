"""The layer patcher: which vLLM classes are replaced, by name, and their owners."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import engine_of, managing, planning, refusing, silu
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.platforms import current_platform

from vllm_fl.contracts.binding import LayerTarget
from vllm_fl.dispatch.context import building
from vllm_fl.dispatch.resolver import FOREIGN
from vllm_fl.engine.plan import Plan
from vllm_fl.engine.start_line import line, notes
from vllm_fl.errors import AllFailedError
from vllm_fl.integration import entry
from vllm_fl.integration.models import import_models
from vllm_fl.integration.patchers import layers
from vllm_fl.integration.targets import targets
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl


@pytest.fixture(autouse=True)
def _nothing_found_before() -> None:
    """A test that emulates a platform can make an import fail, and failures are cached."""
    layers._found.cache_clear()


def test_every_layer_that_a_binding_names_is_there_and_has_one_op() -> None:
    for _, target in targets(known_contracts().bindings, LayerTarget):
        with contextlib.suppress(ModuleNotFoundError):  # of another release
            import_module(target.path.rpartition(".")[0])
    table = layers.layer_table()
    assert {layer.op for layer in table} == {
        op for op, _ in targets(known_contracts().bindings, LayerTarget)
    }
    assert len({layer.base for layer in table}) == len(table)
    known = layers.Layers().layer_names()  # lists may contain each name
    for layer in table:
        assert layer.registered in custom_op.op_registry
        assert {layer.cls, layer.registered} <= known
    assert "fused_moe" in known, "a former name"


def test_a_layer_of_few_models_counts_if_the_model_or_its_drafter_has_imported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its import opens the GPU: vLLM forks an engine's processes only before that."""
    module = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

    def is_there() -> bool:
        return "ChunkGatedDeltaRule" in {layer.cls for layer in layers.layer_table()}

    def architecture(config: str) -> None:
        sys.modules.update({module: imported} if config == "drafter" else {})
        raise RuntimeError("not a model")

    imported = import_module(module)
    monkeypatch.delitem(sys.modules, module)
    assert not is_there() and module not in sys.modules
    monkeypatch.setattr(
        "vllm.model_executor.model_loader.utils.get_model_architecture", architecture
    )
    speculative = SimpleNamespace(draft_model_config="drafter")
    import_models(cast("Any", SimpleNamespace(model_config="m", speculative_config=speculative)))
    assert is_there()


def test_layers_of_each_of_vllms_tables_are_replaced_though_names_were_rebound_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM may substitute its hardware-agnostic classes for its own while general plugins run."""
    agnostic = pytest.importorskip("vllm.model_executor.hw_agnostic.layers.activation").SiluAndMul
    second = pytest.importorskip("vllm.model_executor.hw_agnostic.custom_op")
    monkeypatch.setattr(second, "current_platform", current_platform)  # as left by another test
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("vllm.model_executor.layers.activation.SiluAndMul", agnostic)
        entry.general_plugin()
        assert layers._found.cache_info().currsize == 0, "nothing was looked up"

    both = [layer for layer in layers.layer_table() if layer.op == "silu_and_mul"]
    monkeypatch.setattr(layers, "layer_table", lambda: both)  # norm classes refer to the IR
    tables = {SiluAndMul: (custom_op, {}), agnostic: (second, {"SiluAndMul": Theirs})}
    for module, table in tables.values():
        monkeypatch.setattr(module, "op_registry_oot", table)
    assert [table for table, _, _ in layers.ours()] == [custom_op.op_registry_oot], "theirs stays"
    monkeypatch.setattr(second, "op_registry_oot", {})
    plan = planning(managing(silu("vendor.acme", 100)))
    for cls, (module, _) in tables.items():
        with set_current_vllm_config(eager()), building(plan), layers.in_tables(layers.ours()):
            layer = cls()
            assert isinstance(layer, cls) and type(layer) is module.op_registry_oot["SiluAndMul"]
        assert layer(X)[0, 0] == 103 and module.op_registry_oot == {}


def test_a_layer_of_another_plugin_is_reported_with_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = type("Theirs", (), {"__module__": "pytest"})
    monkeypatch.setitem(custom_op.op_registry_oot, "SiluAndMul", theirs)
    (owner_text,) = [v for k, v in layers.foreign_layers().items() if k == "SiluAndMul"]
    assert owner_text.startswith("pytest.Theirs of pytest ")
    nobodys = type("Nobodys", (), {"__module__": "no_such_module"})
    assert layers.owner_of(nobodys) == "no_such_module.Nobodys"


class Theirs(SiluAndMul):
    """Another plugin's layer, recognised by the sign of its result."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward_native(x)

    forward_cpu = forward_oot


class Bypassing(Theirs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_oot(x)


def eager() -> VllmConfig:
    compilation = CompilationConfig(mode=CompilationMode.NONE, custom_ops=["all"])
    return VllmConfig(compilation_config=compilation)


def built(plan: Plan) -> Any:
    patched = layers.Layers().building(engine_of(plan))
    with set_current_vllm_config(eager()), building(plan), patched:
        return SiluAndMul()


X = torch.full((2, 8), 3.0)


@pytest.mark.parametrize("theirs", [Theirs, Bypassing])
def test_a_layer_of_another_plugins_is_its_own_until_the_plan_takes_it(
    theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = custom_op.op_registry_oot
    monkeypatch.setitem(table, "SiluAndMul", theirs)
    foreign, own = layers.foreign_ops(), SiluAndMul.forward_native(X)

    def plan(*order: Any, impl: OpImpl | None = None, strict: bool = False, **more: Any) -> Plan:
        orders = {"silu_and_mul": order[0] if len(order) == 1 else [*order]}
        manager = managing(impl or silu("vendor.acme", 100), per_op_order=orders, strict=strict)
        return planning(manager, foreign=foreign, **more)

    for order in (["foreign", "vendor"], ["foreign", "stock"]):
        left = plan(*order)
        assert type(built(left)) is theirs and left.is_stock("silu_and_mul")
        assert "silu_and_mul=foreign" in line(left)
        assert any("layer SiluAndMul is " in note for note in notes(left))
    kept = plan("vendor", "foreign", notes={"silu_and_mul": "oot_blacklist lists SiluAndMul"})
    assert type(built(kept)) is theirs and kept.entries["silu_and_mul"].label == "foreign"
    assert type(built(plan("stock"))) is SiluAndMul
    for order, computes in ((["foreign"], True), (["stock", "foreign"], False)):
        assert ("SiluAndMul" in layers.Layers().contents(plan(*order))["foreign"]) == computes, (
            "in the digest"
        )

    strict = plan("vendor", strict=True, impl=refusing("vendor.acme", "no"))
    with pytest.raises(AllFailedError, match="Strict mode does not fall back"):
        built(strict)(X)
    taking = plan("vendor")
    layer = built(taking)
    assert isinstance(layer, theirs) and table["SiluAndMul"] is theirs, "put back"
    assert layer(X)[0, 0] == 103 and taking.entries["silu_and_mul"].label == "vendor.acme"
    assert type(built(taking)) is type(layer)
    assert layers.foreign_layers()["SiluAndMul"] == layers.owner_of(theirs)

    refusing_all = plan("vendor", impl=refusing("vendor.acme", "no"))
    assert built(refusing_all)(X).equal(-own)
    passes = 1 if theirs is Theirs else 2  # Bypassing.forward calls our forward again
    assert refusing_all.fallbacks == {("silu_and_mul", FOREIGN.impl_id): passes}
    without_them = plan("vendor", "stock", impl=refusing("vendor.acme", "no"))
    assert built(without_them)(X).equal(own)
    by_size = plan({"<=1": "vendor", "rest": ["foreign"]})
    assert built(by_size)(X).equal(-own) and built(by_size)(X[:1])[0, 0] == 103

    engine = engine_of(plan("foreign"))
    engine.worker.vllm_config = eager()
    layers.Layers().bind(engine, layer)
    assert layer(X).equal(-own), "a plan that has given it up"
