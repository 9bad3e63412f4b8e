"""Classes for quantised experts, on layers of vLLM without a model."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from builders import managing, planning
from quantised_layers import draw, made_experts, vllm_process
from torch import nn
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
)

import vllm_fl.dispatch
from vllm_fl.dispatch.resolver import vllms_kernel
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.patchers import expert_kernels as module
from vllm_fl.integration.patchers import kernel_classes as classes
from vllm_fl.integration.patchers.linear_kernels import LinearKernels, first_in_lists, kernel_class
from vllm_fl.plugins.inspection import Moment
from vllm_fl.plugins.types import EXPERT_OPS, BackendImplKind, ExpertKernelImpl
from vllm_fl.settings.loading import load_settings

__all__ = ["draw", "vllm_process"]

OP, VLLMS, NAME = "int8_experts", CPUExpertsInt8, CPUExpertsInt8.__name__
PATCHER = LinearKernels()


class Acme(CPUExpertsInt8):  # type: ignore[misc]
    """Vendor's class, with a verdict on layers."""

    refusal: str | None = None

    @staticmethod
    def is_supported_config(own: Any, *given: Any) -> Any:
        return (False, own.refusal) if own.refusal else VLLMS.is_supported_config(own, *given)


@pytest.fixture(autouse=True)
def on_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's classes of experts for CPUs require AMX. They are chosen here, but do not compute."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`engine(order)`: an engine of a model with int8 experts, and an installed class."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))

    def make(order: str) -> Any:
        impl = ExpertKernelImpl("int8", f"{__name__}.Acme", BackendImplKind.VENDOR, "acme")
        manager = managing(impl, per_op_order={OP: order})
        monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
        settings = load_settings({"VLLM_FL_PER_OP": f"{OP}={order}"})
        with first_in_lists({}):
            uses = classes.uses_of([made_experts(random.Random(0))])
        facts = dataclasses.replace(EngineFacts(settings, "eager"), kernels={OP: uses})
        plan: Plan = planning(manager, demoted=PATCHER.why_not(facts).impls)
        remarks: dict[Moment, list[str]] = {Moment.LOADED: []}
        config = SimpleNamespace(quant_config="int8", speculative_config=None)
        return SimpleNamespace(
            plan=plan, facts=facts, models={}, config=config, rank=0, state={}, remarks=remarks
        )

    return make


def built(engine: Any, draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """The row of the report on experts that are built for an engine, and the remarks."""
    with PATCHER.building(engine):
        engine.models = {"": nn.ModuleDict({"experts": made_experts(draw)})}
    PATCHER.loaded(engine)
    (row,) = PATCHER.report(engine)["kernels"]
    return row, engine.remarks[Moment.LOADED]


@pytest.mark.parametrize("op", EXPERT_OPS)
def test_vllm_has_the_functions_and_classes_of_each_scheme(op: str) -> None:
    assert classes.known_classes(op)
    callers = {names["__name__"]: name for names, name, _ in [*module.choosing_experts({})][1:]}
    assert {f"{module.ORACLES}.{name}" for name in module.MODULES} <= callers.keys()


def test_a_module_of_vllm_that_fails_has_no_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "import_module", lambda _: 1 / 0)
    assert not classes.known_classes("fp8_experts")


def test_the_first_class_of_the_order_computes_the_experts(
    engine: Callable[..., Any], draw: random.Random
) -> None:
    row, remarks = built(engine("vendor:acme|stock"), draw)
    assert {key: row[key] for key in ("op", "class", "impl", "layers")} == {
        "op": OP, "class": "Acme", "impl": "vendor.acme", "layers": 1,
    }  # fmt: skip
    assert row["others"][NAME] == "it can, but Acme precedes it"
    assert "does not support current device" in row["others"]["TritonExperts"]
    assert not remarks
    assert made_experts(draw).quant_method.experts_cls is CPUExpertsInt8
    row, _ = built(engine(f"impl:vllm.{NAME}|stock"), draw)
    assert (row["class"], row["impl"]) == (NAME, f"vllm.{NAME}")


def test_experts_that_the_class_does_not_support_fall_back(
    engine: Callable[..., Any], draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = engine("vendor:acme|stock")
    monkeypatch.setattr(Acme, "refusal", "only 96 experts")
    row, (remark,) = built(planned, draw)
    assert (row["class"], row["impl"]) == (NAME, "stock.vllm")
    assert remark.endswith(f"which use {NAME}: only 96 experts")
    row, remarks = built(engine("vendor:acme|stock"), draw)
    assert row["impl"] == "stock.vllm" and not remarks, "it was not planned"


@pytest.mark.parametrize(
    ("scheme", "path", "why"),
    [
        ("wna16", "Acme", "vLLM accepts only its own classes for wna16_experts"),
        ("int8", "OP", "is not a subclass of vLLM's ArmCPUExpertsInt8 or "),
    ],
)
def test_a_class_that_cannot_be_used_is_a_fault(scheme: str, path: str, why: str) -> None:
    impl = ExpertKernelImpl(scheme, f"{__name__}.{path}", BackendImplKind.VENDOR, "acme")
    assert why in kernel_class(f"{scheme}_experts", impl)[1]
    other = vllms_kernel(OP, "vllm.CPUExpertsInt4")
    assert "has no class 'CPUExpertsInt4' for int8_experts" in kernel_class(OP, other)[1]


def test_a_backend_that_the_user_set_in_vllm_overrides_the_order() -> None:
    config = SimpleNamespace(kernel_config=SimpleNamespace(moe_backend="triton"))
    notes = PATCHER.request(config, compiled=False)["linear_notes"]
    assert notes == dict.fromkeys(EXPERT_OPS, "--moe-backend is triton")


@pytest.mark.parametrize(
    ("keys", "op"),
    [
        ((kFp8Static128BlockSym, kFp8Dynamic128Sym), "fp8_block_experts"),
        ((kFp8StaticTensorSym, kFp8DynamicTensorSym), "fp8_experts"),
    ],
)
def test_fp8_with_scales_for_blocks_has_an_op_of_its_own(
    keys: tuple[Any, Any], op: str, draw: random.Random
) -> None:
    from vllm.model_executor.layers.quantization import fp8

    with first_in_lists({}):
        moe = made_experts(draw).quant_method.moe
        fp8.select_fp8_moe_backend(moe, *keys)
        found = module.offers_for(SimpleNamespace(moe=moe))
    assert found is not None and found.op == op


def test_a_module_imported_while_a_model_is_built_follows_the_plan_of_each_model(
    draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.online import int8

    config, late = made_experts(draw).quant_method.moe, ModuleType(f"{module.LAYERS}late")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    with first_in_lists({OP: [Acme]}):
        vars(late)["select_int8_moe_backend"] = select = int8.select_int8_moe_backend
        assert select(config)[1] is Acme
    delattr(config, module.ATTRIBUTE)
    assert select(config)[1] is CPUExpertsInt8 and not hasattr(config, module.ATTRIBUTE)
    assert int8.select_int8_moe_backend is not select
    with first_in_lists({OP: [Acme]}):
        assert select(config)[1] is Acme
