"""The patcher of quantised linear layers, on layers of vLLM without a model."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from builders import managing, planning
from quantised_layers import draw, made, vllm_process
from torch import nn
from vllm.model_executor.kernels.linear import CPUInt8ScaledMMLinearKernel

import vllm_fl.dispatch
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.errors import StartError, TargetError
from vllm_fl.integration.patchers import kernel_classes as classes
from vllm_fl.integration.patchers import linear_kernels as module
from vllm_fl.plugins.inspection import Moment
from vllm_fl.plugins.types import KERNEL_OPS, LINEAR_OPS, BackendImplKind, LinearKernelImpl
from vllm_fl.settings.loading import load_settings

__all__ = ["draw", "vllm_process"]

PATCHER = module.LinearKernels()
FACTS = EngineFacts(load_settings({}), "eager")


class Acme(CPUInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """Vendor's class, with a verdict on layers."""

    refusal: str | None = None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return cls.refusal is None, cls.refusal


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Plan, EngineFacts]]:
    """`plan(order, path)`: the plan with an installed class, and the facts of a model with an int8
    layer and one that is not quantised."""
    monkeypatch.setitem(__import__("sys").modules, __name__, SimpleNamespace(**globals()))

    def make(order: str, path: str = "Acme", **more: Any) -> tuple[Plan, EngineFacts]:
        impl = LinearKernelImpl("int8", f"{__name__}.{path}", BackendImplKind.VENDOR, "acme")
        manager = managing(impl, per_op_order={"int8_linear": order}, **more)
        monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
        settings = load_settings({"VLLM_FL_PER_OP": f"int8_linear={order}"})
        uses = classes.uses_of([model_of(random.Random(0))])
        kernels = {op: [use for use in uses if use.op == op] for op in ("int8_linear", "")}
        facts = dataclasses.replace(FACTS, settings=settings, kernels=kernels)
        refused = PATCHER.why_not(facts).impls
        return planning(manager, demoted=refused, notes=PATCHER.why_not(facts).ops), facts

    return make


def model_of(draw: random.Random) -> nn.Module:
    return nn.ModuleDict({"quantised": made("int8", draw), "plain": made("bfloat16", draw)})


def engine_of(plan: Plan, facts: EngineFacts, model: nn.Module, **kernels: Any) -> Any:
    given = {"quant_config": "int8", "speculative_config": None}
    config = SimpleNamespace(kernel_config=SimpleNamespace(**kernels), **given)
    remarks: dict[Moment, list[str]] = {Moment.LOADED: []}
    return SimpleNamespace(
        plan=plan, facts=facts, models={"": model}, config=config, rank=0, state={}, remarks=remarks
    )


def class_of(model: nn.Module) -> type:
    return type(classes.kernel_of(model["quantised"], model["quantised"].quant_method))


@pytest.mark.parametrize("op", LINEAR_OPS)
def test_vllm_has_the_list_and_the_bases_of_each_scheme(op: str) -> None:
    names, scheme = vars(import_module(classes.LINEAR_KERNELS)), classes.SCHEMES[op]
    known = {cls for listed in names[scheme.table].values() for cls in listed}
    assert known and all(issubclass(c, tuple(names[b] for b in scheme.bases)) for c in known)


def test_the_first_class_of_the_order_computes_the_layers_built_inside(
    plan: Callable[..., Any], draw: random.Random
) -> None:
    engine = engine_of(*plan("vendor:acme|stock"), nn.Module())
    listed = classes.listed_classes("int8_linear")
    with PATCHER.building(engine):
        assert classes.listed_classes("int8_linear") == [Acme, *listed]
        ours = model_of(draw)
    assert classes.listed_classes("int8_linear") == listed
    assert (class_of(ours), class_of(model_of(draw))) == (Acme, CPUInt8ScaledMMLinearKernel)
    engine.models = {"": ours}
    PATCHER.loaded(engine)
    own, plain = PATCHER.report(engine)["kernels"]
    assert {**own, "others": None} == {
        "op": "int8_linear", "class": "Acme", "impl": "vendor.acme", "layers": 1, "others": None,
    }  # fmt: skip
    why = "it can, but Acme precedes it"
    assert own["others"]["CPUInt8ScaledMMLinearKernel"] == why
    assert own["others"]["ZentorchInt8ScaledMMLinearKernel"] == "requires AMD Zen CPU"
    assert (plain["class"], plain["op"], plain["impl"]) == ("UnquantizedLinearMethod", None, None)
    assert not engine.remarks[Moment.LOADED] and not engine.plan.fallbacks
    assert classes.uses_of([nn.ModuleDict({"plain": made("bfloat16", draw)})]) == []


def test_vllms_own_class_is_a_candidate_of_the_order(plan: Callable[..., Any]) -> None:
    made_plan, facts = plan("impl:vllm.CPUInt8ScaledMMLinearKernel|vendor|stock")
    (op, (first, second)) = next(iter(module.planned_kernels(made_plan).items()))
    assert module.kernel_class(op, first) == (CPUInt8ScaledMMLinearKernel, "")
    assert second.impl_id == "vendor.acme"
    assert PATCHER.faults(made_plan, facts) == {}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("CutlassInt8ScaledMMLinearKernel", "does not support this model: requires CUDA"),
        ("CPUInt8ScaledMMLinearKernl", "has no class 'CPUInt8ScaledMMLinearKernl' for int8_linear"),
        ("CPUWNA16LinearKernel", "has no class 'CPUWNA16LinearKernel' for int8_linear"),
    ],
)
def test_a_class_that_cannot_compute_the_model_is_rejected_and_named(
    plan: Callable[..., Any], draw: random.Random, name: str, why: str
) -> None:
    made_plan, facts = plan(f"impl:vllm.{name}|stock")
    assert why in PATCHER.why_not(facts).impls["int8_linear", f"vllm.{name}"]
    assert made_plan.entries["int8_linear"].label == "stock"
    engine = engine_of(made_plan, facts, model_of(draw))
    PATCHER.loaded(engine)
    (remark,) = engine.remarks[Moment.LOADED]
    assert remark.startswith(f"Op 'int8_linear': 'vllm.{name}' is not used: ") and why in remark


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("Missing", "failed: AttributeError"),
        ("FACTS", "is not a subclass of vLLM's Int8ScaledMMLinearKernel"),
    ],
)
def test_a_class_that_cannot_be_used_is_a_fault(
    plan: Callable[..., Any], path: str, why: str
) -> None:
    assert why in PATCHER.faults(*plan("vendor|stock", path))["int8_linear", "vendor.acme"]


def test_a_backend_or_a_weight_cache_in_vllm_overrides_the_order(plan: Callable[..., Any]) -> None:
    per_quant = {"linear_backend_per_quant": {"fp8_w8a8": "torch"}}
    config = SimpleNamespace(kernel_config=SimpleNamespace(linear_backend="auto", **per_quant))
    request = PATCHER.request(config, compiled=False)
    assert request == {"linear_notes": {"fp8_linear": "--linear-backend is torch"}}
    config.kernel_config.linear_backend = "cutlass"
    notes = PATCHER.request(config, compiled=False)["linear_notes"]
    assert notes["fp8_linear"] == "--linear-backend is torch"
    facts = dataclasses.replace(plan("vendor|stock")[1], linear_notes=notes)
    assert PATCHER.why_not(facts).ops["int8_linear"] == "--linear-backend is cutlass"
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="ipc_cache"))
    notes = PATCHER.request(config, compiled=False)["linear_notes"]
    assert notes.keys() == {*KERNEL_OPS} and "weight cache" in notes["fp8_linear"]


def test_a_backend_of_vllm_that_is_not_followed_is_reported(
    plan: Callable[..., Any], draw: random.Random
) -> None:
    made_plan, facts = plan("stock")
    engine = engine_of(made_plan, facts, model_of(draw), linear_backend="cutlass")
    PATCHER.loaded(engine)
    (remark,) = engine.remarks[Moment.LOADED]
    assert remark == (
        "--linear-backend is cutlass, but vLLM uses CPUInt8ScaledMMLinearKernel for 1 layers of "
        "int8_linear, such as quantised"
    )


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_that_the_class_does_not_support_falls_back(
    plan: Callable[..., Any], draw: random.Random, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    engine = engine_of(*plan("vendor:acme|stock", strict=strict), nn.Module())
    monkeypatch.setattr(Acme, "refusal", "only 96 output features")
    with PATCHER.building(engine):
        engine.models = {"": model_of(draw)}
    why = "does not compute 1 layers, such as quantised, which use CPUInt8ScaledMMLinearKernel: "
    if strict:
        with pytest.raises(TargetError, match="Strict mode does not fall back"):
            PATCHER.loaded(engine)
        return
    PATCHER.loaded(engine)
    assert f"{why}only 96 output features" in engine.remarks[Moment.LOADED][0]
    assert engine.plan.fallbacks == Counter({("int8_linear", "stock.vllm"): 1})


def test_vllm_does_not_move_a_class_before_the_planned_ones(
    plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.32 on, vLLM prefers Humming on some devices after it has read the list."""
    kernels = import_module(classes.LINEAR_KERNELS)
    if not hasattr(kernels, "prioritize_humming"):
        pytest.skip("this vLLM does not reorder its list")
    monkeypatch.setattr(kernels, "prioritize_humming", lambda listed, *_: listed[::-1])
    with PATCHER.building(engine_of(*plan("vendor:acme|stock"), nn.Module())):
        listed = classes.listed_classes("int8_linear")
        assert kernels.prioritize_humming(listed, 90) == [Acme, *listed[:0:-1]]


def test_a_model_with_a_disabled_class_must_be_loaded_again(plan: Callable[..., Any]) -> None:
    engine = engine_of(*plan("vendor:acme|stock"), nn.Module())
    with PATCHER.building(engine):
        assert not PATCHER.stale(engine)
    engine.plan, _ = plan("stock")
    engine.is_loaded = False
    PATCHER.bind(engine, nn.Module())
    assert PATCHER.stale(engine)
    engine.is_loaded = True  # the KV cache is allocated
    with pytest.raises(StartError, match="cannot be replaced"):
        PATCHER.bind(engine, nn.Module())


def test_experts_without_the_backend_that_the_user_set_are_reported() -> None:
    import enum

    backend = enum.Enum("Fp8MoeBackend", ["TRITON", "FLASHINFER_TRTLLM"])  # type: ignore[misc]
    experts = nn.Module()
    experts.register_parameter("w13_weight", None)
    experts.quant_method = SimpleNamespace(fp8_backend=backend.TRITON)
    for name, expected in (("flashinfer_trtllm", 1), ("triton", 0), ("auto", 0)):
        engine = engine_of(None, FACTS, experts, moe_backend=name)  # type: ignore[arg-type]
        assert len([*module._experts_not_followed(engine)]) == expected
