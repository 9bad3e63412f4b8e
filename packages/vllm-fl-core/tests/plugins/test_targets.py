"""A target in vLLM belongs to one op: a second plugin that declares it is rejected by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from builders import found, spec_of

from vllm_fl.contracts.binding import (
    AttentionTarget,
    Binding,
    Contract,
    FunctionTarget,
    FusionTarget,
    GraphTarget,
    IrTarget,
    LayerTarget,
    OperatorTarget,
)
from vllm_fl.errors import TargetError
from vllm_fl.plugins.discovery import discover
from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.registry import OpRegistry, known_contracts
from vllm_fl.plugins.reserved import FL_OPS
from vllm_fl.plugins.snapshot import EMPTY


def same(*args: Any) -> Any:
    """Stand-in for a route, a native form or a find."""
    return args[0]


def operator(name: str) -> OperatorTarget:
    return OperatorTarget(name, ("x",), same, same)


def function(*paths: str) -> FunctionTarget:
    return FunctionTarget(paths, ("x",), same, same)


TWICE = {
    "IR op norm": (IrTarget("norm", same), IrTarget("norm", same)),
    "operator _C::norm": (operator("_C::norm"), operator("_C::norm")),
    "function vllm.a.f": (function("vllm.b.f", "vllm.a.f"), function("vllm.a.f")),
    # vLLM's registry identifies a layer by its class's name, in any module.
    "layer Norm": (LayerTarget("vllm.layers.Norm"), LayerTarget("acme.model.Norm")),
    "pass vllm.P": (FusionTarget("vllm.P", "p", ()), FusionTarget("vllm.P", "q", ())),
    "pass_config.p": (FusionTarget("vllm.P", "p", ()), FusionTarget("vllm.Q", "p", ())),
    "operator aten.mm.default in graphs": (
        GraphTarget(("aten.mm.default",), same, same),
        GraphTarget(("aten.add.Tensor", "aten.mm.default"), same, same),
    ),
    "operator aten.mul.Tensor behind silu_and_mul in graphs": (
        GraphTarget(("aten.mul.Tensor",), same, same, parts=("silu_and_mul",)),
        GraphTarget(("aten.mul.Tensor",), same, same, parts=("silu_and_mul",)),
    ),
}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugin]:
    """`plugin(distribution, {op: its targets})`: a plugin with these ops."""

    def made(distribution: str, ops: dict[str, Any]) -> Plugin:
        brought = []
        for op, targets in ops.items():
            module: Any = ModuleType(f"{distribution.replace('-', '_')}_{op}")
            module.BINDING = Binding(tuple(targets))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            brought.append(Contract(spec_of(op), module.__name__))
        return found(distribution, SimpleNamespace(contracts=hookimpl(lambda: brought)))

    return made


@pytest.mark.parametrize("target", TWICE)
def test_a_place_of_any_kind_is_the_first_plugins(plugin: Any, target: str) -> None:
    first, second = TWICE[target]
    registry = OpRegistry(EMPTY)
    mine, other = load(
        registry,
        [
            plugin("fl-acme", {"acme_norm": [first]}),
            plugin("fl-zenith", {"zenith_norm": [second], "zenith_free": []}),
        ],
    )
    assert (mine.status, other.status) == ("ok", "failed")
    assert [*registry.snapshot().contracts] == ["acme_norm"]
    error = other.error
    assert isinstance(error, TargetError)
    assert error.distribution == "fl-zenith 1.0"
    taken = f"{target} is already a target of op 'acme_norm' of fl-acme 1.0"
    assert f"the contract of op 'zenith_norm': {taken}" in str(error)


def test_places_of_our_ops_are_ours_whoever_is_loaded_first(plugin: Any) -> None:
    stranger = plugin("fl-acme", {"acme_norm": [IrTarget("rms_norm", same)]})
    ours = next(f for f in discover() if f.owner.distribution == FL_OPS)
    registry = OpRegistry(EMPTY)
    mine, ops = load(registry, [stranger, ours])
    assert (mine.status, ops.status) == ("failed", "ok")
    assert isinstance(mine.error, TargetError)
    assert "IR op rms_norm is already a target of op 'rms_norm'" in str(mine.error)
    assert "acme_norm" not in registry.snapshot().bindings
    (mine,) = load(OpRegistry(EMPTY), [plugin("fl-acme", {"acme_rows": [AttentionTarget()]})])
    assert isinstance(mine.error, TargetError)
    taken = "the attention backend is already a target of op 'attention_backend' of vllm-fl-core"
    assert taken in str(mine.error)


def test_of_one_plugin_and_in_a_script_a_place_is_one_ops_too(plugin: Any) -> None:
    target = operator("_C::norm")
    both = plugin("fl-acme", {"acme_a": [target, target], "acme_b": [target]})
    assert load(OpRegistry(EMPTY), [both])[0].status == "failed"
    registry = OpRegistry(EMPTY)
    load(registry, [plugin("fl-acme", {"acme_a": [target, target]})])
    contract = Contract(spec_of("acme_c"))
    with pytest.raises(
        TargetError, match=r"'acme_c': operator _C::norm is already a target of op 'acme_a'"
    ):
        registry.add_contract(contract, Binding((target,)), Owner("late"))


def test_our_own_ops_share_no_place() -> None:
    known = known_contracts()
    registry = OpRegistry(EMPTY)
    for op, binding in known.bindings.items():
        registry.add_contract(Contract(known.contracts[op]), binding, known.authors[op])
