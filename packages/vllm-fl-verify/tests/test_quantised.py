"""Verification of planned classes for quantised layers. Each fault is planted in a class over
vLLM's own; its location is drawn from a seed that a failing test prints."""

from __future__ import annotations

import random
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from quantised_layers import (
    FAULTS,
    Fault,
    draw,
    faulty,
    keeping,
    made,
    made_experts,
    no_fault,
    one_group,
    plain_experts,
    vllm_process,
)
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear import CPUInt8ScaledMMLinearKernel, CPUWNA16LinearKernel

from vllm_fl.integration.patchers.kernel_classes import uses_of
from vllm_fl.integration.patchers.linear_kernels import first_in_lists
from vllm_fl.plugins.inspection import FAILED, Moment
from vllm_fl_verify import quantised
from vllm_fl_verify.quantised import MadeLayer
from vllm_fl_verify.stock.experts import MADE_UP
from vllm_fl_verify.stock.weights import dequantised

__all__ = ["draw", "vllm_process"]


def base_of(form: str) -> Any:
    return CPUWNA16LinearKernel if "int4" in form else CPUInt8ScaledMMLinearKernel


def compared(
    form: str, cls: Any, draw: random.Random, reloads: bool = False, device: str = "cpu"
) -> tuple[str, str]:
    """(why the class is incorrect on made weights, remark), for a model with a layer of a form."""
    layer = made(form, draw)
    (use,) = uses_of([nn.ModuleDict({"projection": layer})])
    config = layer.quant_method.quantization_config
    here, seed = torch.device(device), draw.randrange(2**31)
    made_layer = MadeLayer(get_current_vllm_config(), config, here, torch.bfloat16, seed, reloads)
    return made_layer.compare(use.op, cls, [use])


@pytest.fixture(autouse=True)
def activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default vLLM quantises the activations of WNA16 layers on a CPU with AMX."""
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")


@pytest.mark.parametrize("form", ["int8", "int4", "int4 with zeros"])
def test_vllms_classes_are_correct_on_made_weights(form: str, draw: random.Random) -> None:
    assert compared(form, base_of(form), draw) == ("", "")


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="the CPU has no AMX")
def test_quantised_activations_of_wna16_are_a_remark(
    draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    problem, remark = compared("int4", base_of("int4"), draw)
    assert not problem
    assert remark.endswith("with quantised activations, the checkpoint is for 16-bit activations")


def test_vllms_class_is_incorrect_for_asymmetric_activations(draw: random.Random) -> None:
    """vLLM 0.32: a row of equal numbers has no range."""
    problem, _ = compared("int8 asymmetric", base_of("int8"), draw)
    assert problem.endswith("rows of equal numbers")


@pytest.mark.parametrize(
    ("form", "fault"), [(form, each) for form, faults in FAULTS.items() for each in faults]
)
def test_a_fault_in_the_weights_is_found(form: str, fault: Fault, draw: random.Random) -> None:
    problem, _ = compared(form, faulty(base_of(form), fault, draw), draw)
    assert problem.startswith("on made weights, layer ")


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rows_that_are_not_written_are_found(form: str, draw: random.Random) -> None:
    cls = faulty(base_of(form), no_fault, draw, unwritten=draw.randrange(1, 16))
    assert "rows" in compared(form, cls, draw)[0]


def test_a_class_that_keeps_the_first_weights_does_not_survive_an_update(
    draw: random.Random,
) -> None:
    cls = keeping(base_of("int4"))
    assert compared("int4", cls, draw) == ("", "")
    problem, _ = compared("int4", cls, draw, reloads=True)
    assert problem.startswith("on made weights loaded again, layer ")
    assert compared("int4", base_of("int4"), draw, reloads=True) == ("", "")


def test_the_devices_own_tensors_are_not_the_default_while_a_made_layer_is_converted(
    draw: random.Random,
) -> None:
    """As while vLLM loads weights. A generator of the CPU cannot draw tensors of a GPU."""

    def raises(*_: Any) -> None:
        raise RuntimeError(f"the default is {torch.empty(0).device}")

    problem, _ = compared("int8", faulty(base_of("int8"), raises, draw), draw, device="meta")
    assert problem == "on made weights, it raised RuntimeError: the default is cpu"


def test_another_precision_than_the_checkpoints_is_a_remark(draw: random.Random) -> None:
    class Weights(base_of("int8")):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            self.dense = layer.weight.float() * layer.weight_scale.float()

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return nn.functional.linear(x.float(), self.dense, bias).to(x.dtype)

    what = "Weights computes with 16-bit activations, the checkpoint is for quantised activations"
    assert compared("int8", Weights, draw) == ("", what)


def test_a_class_that_refuses_the_layer_is_not_verified(draw: random.Random) -> None:
    class Refusing(base_of("int8")):  # type: ignore[misc]
        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str]:
            return False, "no"

    assert compared("int8", Refusing, draw) == ("", "Refusing is not verified on made weights: no")


def engine_of(cls: Any, key: tuple[str, str], patch: pytest.MonkeyPatch) -> Any:
    """An engine. Its plan has the class, also for another scheme."""
    planned = {(key[0], cls): key[1], ("int8_linear", cls): "vendor.other"}
    patch.setattr(quantised, "planned_classes", lambda plan: planned)
    patch.setattr(quantised, "checks_of", lambda engine: SimpleNamespace(seed=7))
    state = {quantised._Quantised: quantised._Quantised(None)}
    return SimpleNamespace(plan=None, state=state, remarks={each: [] for each in Moment})


def watch(engine: Any, layer: Any, patch: pytest.MonkeyPatch) -> None:
    """Let vLLM build a model of this layer."""
    utils = import_module("vllm.model_executor.model_loader.utils")
    patch.setattr(utils, "initialize_model", lambda config: nn.ModuleDict({"ours": layer}))
    with quantised.watching_layers(engine):
        utils.initialize_model(None)


@pytest.mark.parametrize("fault", [no_fault, one_group])
def test_each_loaded_layer_of_a_planned_class_is_compared(
    fault: Fault, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the layers of planned classes: vLLM's other layer has the fault as well."""
    utils = import_module("vllm.model_executor.model_loader.utils")
    cls, key = faulty(CPUWNA16LinearKernel, fault, draw), ("wna16_linear", "vendor.acme")
    engine = engine_of(cls, key, monkeypatch)
    state = engine.state[quantised._Quantised]

    def build(config: Any) -> nn.Module:
        with first_in_lists({"wna16_linear": [cls]}):
            ours = made("int4", draw)
        return nn.ModuleDict({"ours": ours, "stock": made("int4", draw)})

    monkeypatch.setattr(utils, "initialize_model", build)
    with quantised.watching_layers(engine):
        model = utils.initialize_model(None)
        fault(model["stock"], draw)
        for layer in model.values():
            layer.quant_method.process_weights_after_loading(layer)
    assert utils.initialize_model is build
    found = quantised.compare_layers_of_plan(engine, Moment.LOADED)
    if fault is no_fault:
        assert not found and engine.remarks[Moment.LOADED] == ["1 quantised layers compared"]
        assert len(state.linears) == 1
        return
    assert found[key].code == FAILED
    assert found[key].reason.startswith("in 1 of 1 layers, such as ours: ")
    assert not state.linears
    assert not quantised.compare_layers_of_plan(engine, Moment.LOADED)


@pytest.mark.parametrize("fault", ["", "while loading", "after loading"])
def test_layers_are_compared_again_after_an_update(
    fault: str, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that differ from those at startup."""
    plants = [no_fault] + [one_group if fault == "while loading" else no_fault] * 2
    cls = faulty(CPUWNA16LinearKernel, lambda *a: plants.pop(0)(*a), draw)
    key = "wna16_linear", "a"
    engine = engine_of(cls, key, monkeypatch)
    with first_in_lists({"wna16_linear": [cls]}):
        layer, *others = (made("int4", draw) for _ in range(3))
    watch(engine, layer, monkeypatch)
    layer.quant_method.process_weights_after_loading(layer)
    assert not quantised.compare_layers_of_plan(engine, Moment.LOADED)
    own = layer.quant_method.apply
    for other in others:  # a fault does not end the comparison of later updates
        engine.remarks[Moment.UPDATED] = []
        for name, value in other.named_parameters():
            setattr(layer, name, value)
        layer.quant_method.process_weights_after_loading(layer)
        if fault == "after loading":  # vLLM copies the new tensors into the old ones
            vars(layer.quant_method)["apply"] = lambda *args: own(*args) * float("nan")
        found = quantised.compare_layers_of_plan(engine, Moment.UPDATED)
        assert found.keys() == ({key} if fault else set())
        assert engine.remarks[Moment.UPDATED] == ([] if fault else ["1 quantised layers compared"])
    assert engine.remarks[Moment.LOADED] == ["1 quantised layers compared"]
    assert not quantised.compare_layers_of_plan(engine, Moment.UPDATED)


def test_floating_point_zero_points_of_experts_are_not_read() -> None:
    packed = torch.randint(1 << 31, (8, 16), dtype=torch.int32)
    held = {"qweight": packed, "scales": torch.rand(2, 16)}
    plain = dequantised(held, (16, 64), [16], None)
    assert plain is not None
    of_experts = dequantised(held | {"qzeros": torch.rand(2, 2)}, (16, 64), [16], None)
    assert torch.equal(plain, of_experts)


CHANGES = {
    "last token": lambda out: out[-1].mul_(1.5),
    "loud feature": lambda out: out[:, 0].mul_(1.03),  # less than the roundings of activations
}
LEFT_OUT = {"routing": "the class also computes the routing", "made up": MADE_UP}


@pytest.mark.parametrize("fault", ["", *CHANGES, *LEFT_OUT, "tiny weights"])
def test_planned_experts_are_compared(
    fault: str, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = plain_experts(CHANGES.get(fault, id))
    key = "int8_experts", "vendor.acme"
    engine = engine_of(acme, key, monkeypatch)
    with first_in_lists({key[0]: [acme]}):
        layer = made_experts(draw)
    if fault == "tiny weights":
        layer.w13_weight_scale.data *= 1e-12
    if fault == "made up":
        layer.w2_weight_scale.data *= -1
    layer.w2_weight_scale.data[:, 0] *= 1000 if fault == "loud feature" else 1
    watch(engine, layer, monkeypatch)
    if fault == "routing":
        monkeypatch.setattr(type(layer.quant_method), "is_monolithic", True)
    layer.quant_method.process_weights_after_loading(layer)
    found = quantised.compare_layers_of_plan(engine, Moment.LOADED)
    if fault == "last token":
        assert found[key].reason.startswith("in 1 of 1 layers, such as ours: the result: ")
        return
    (remark,) = engine.remarks[Moment.LOADED]
    why = LEFT_OUT.get(fault)
    left = f"int8_experts: 1 layers not verified: {why}"
    assert not found and remark == (left if why else "1 quantised layers compared")
