"""The patcher of whole layers: vLLM's table, timing and rejections."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import engine_of, managing, planning
from vllm.model_executor import custom_op
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, maybe_get_oot_by_class

import vllm_fl.dispatch
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.errors import VllmFLError
from vllm_fl.integration import patching
from vllm_fl.integration.patchers import layers, whole_layers
from vllm_fl.plugins.types import BackendImplKind, Impl, LayerImpl, LayerRequest
from vllm_fl.settings.loading import load_settings

TABLE = custom_op.op_registry_oot
REQUEST = LayerRequest("", torch.bfloat16)
NOTHING: dict[str, Any] = {}

PATCHER = whole_layers.WholeLayers()


class Mixer(PluggableLayer):
    """Stand-in for a vLLM layer."""

    __module__ = "vllm.mixers"
    name = "test_mixer"

    def forward(self, x: int) -> int:
        return x


class BigMixer(Mixer):
    __module__ = "vllm.mixers"


class Plain(CustomOp):
    __module__ = "vllm.mixers"
    name = "test_plain"


class OwnMixer(Mixer):
    __module__ = "acme"

    def forward(self, x: int) -> int:
        return x + 1


class OwnPlain(Plain):
    __module__ = "acme"


class OwnBig(BigMixer):
    __module__ = "acme"


ACME = SimpleNamespace(OwnMixer=OwnMixer, OwnPlain=OwnPlain, OwnBig=OwnBig, number=7)


def impl(layer: str = "Mixer", name: str = "OwnMixer", **fields: Any) -> LayerImpl:
    return LayerImpl(layer, f"acme.{name}", BackendImplKind.VENDOR, "acme", **fields)


Make = Callable[..., Plan]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`plan(impl, …, strict=…)`: the plan with these installed."""
    monkeypatch.setitem(sys.modules, "acme", ACME)  # type: ignore[arg-type]
    monkeypatch.setattr(logging.getLogger("vllm_fl"), "propagate", True)
    whole_layers._chosen.cache_clear()
    layers._found.cache_clear()  # a test that emulates a platform can make an import fail
    before = dict(TABLE)

    def make(*impls: Impl, notes: Any = None, foreign: Any = NOTHING, **policy: Any) -> Plan:
        manager = managing(*impls, **policy)
        monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
        return planning(manager, notes=notes or {}, foreign=foreign)

    yield make
    TABLE.clear()
    TABLE.update(before)


def facts(mode: Any = "eager", env: Any = None, **fields: Any) -> EngineFacts:
    return EngineFacts(load_settings(env or {}), mode, layers=REQUEST, **fields)


def test_it_stands_in_vllms_table_while_the_block_runs(plan: Make) -> None:
    made, before = plan(impl()), dict(TABLE)
    with PATCHER.building(engine_of(made)):
        assert type(Mixer()) is OwnMixer
        assert type(BigMixer()) is BigMixer, "a subclass is a layer of its own"
        assert maybe_get_oot_by_class(Mixer) is OwnMixer
    assert before == TABLE and type(Mixer()) is Mixer
    with pytest.raises(OSError), PATCHER.building(engine_of(made)):
        raise OSError("no weights")
    assert before == TABLE
    assert OwnMixer.name == "test_mixer", "the class is not written to"


def test_what_is_left_to_vllm_does_not_stand_there(plan: Make) -> None:
    for made in (
        plan(impl(), per_op_order={"Mixer": ["stock"]}),
        plan(impl(), notes={"Mixer": "oot_blacklist lists Mixer"}),
        plan(impl(available=lambda: "no card")),
    ):
        with PATCHER.building(engine_of(made)):
            assert type(Mixer()) is Mixer


def test_another_plugins_entry_is_left_alone_or_taken(plan: Make) -> None:
    plan(impl())
    theirs = type("Theirs", (Mixer,), {"__module__": "pytest"})
    TABLE["Mixer"] = theirs
    foreign = layers.foreign_ops()
    assert foreign["Mixer"]["Mixer"].startswith("pytest.Theirs of pytest ")
    for order, cls, label in (
        (["foreign", "vendor"], theirs, "foreign"),
        (["vendor"], OwnMixer, "vendor.acme"),
        (["vendor", "foreign"], OwnMixer, "vendor.acme"),
        (["stock"], Mixer, "stock"),
    ):
        made = plan(impl(), per_op_order={"Mixer": order}, foreign=foreign)
        assert made.entries["Mixer"].label == label
        engine = engine_of(made)
        with patching.entered(lambda each, engine=engine: each.building(engine)):
            assert type(Mixer()) is cls
        assert TABLE["Mixer"] is theirs


@pytest.mark.parametrize(
    ("layer", "name", "words"),
    [
        ("Mixer", "OwnBig", None),  # subclasses count at any depth
        ("BigMixer", "OwnMixer", "acme.OwnMixer is not a subclass of vLLM's BigMixer"),
        ("Mixer", "number", "acme.number is not a class"),
        ("Mixer", "Absent", "its class acme.Absent failed: AttributeError"),
        ("Mixr", "OwnMixer", "has no layer class 'Mixr'. Did you mean 'Mixer'?"),
        ("PluggableLayer", "OwnMixer", "has no layer class 'PluggableLayer'"),
    ],
)
def test_a_class_that_cannot_be_used_is_a_fault_by_name(
    plan: Make, layer: str, name: str, words: str | None
) -> None:
    import vllm.model_executor.layers.linear  # noqa: F401 (loaded in a worker)

    found = PATCHER.faults(plan(impl(layer, name)), facts())
    assert (words in found[layer, "vendor.acme"]) if words else not found


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (lambda request: True, None),
        (lambda request: "tensor parallel", "does not support this engine: tensor parallel"),
        (lambda request: None, "returned neither True nor a reason"),
        (lambda request: 1 / 0, "its supports raised ZeroDivisionError"),
        (lambda request: sys.exit(2), "its supports raised SystemExit: 2"),
    ],
)
def test_refusals(plan: Make, verdict: Any, words: str | None) -> None:
    plan(impl(supports=verdict))
    found = PATCHER.why_not(facts()).impls
    assert (words in found["Mixer", "vendor.acme"]) if words else not found


def test_a_class_that_is_not_available_is_not_asked_and_a_layer_of_an_op_is_the_ops(
    plan: Make,
) -> None:
    plan(impl(available=lambda: "no card", supports=lambda request: 1 / 0))
    assert PATCHER.why_not(facts()).impls == {}
    assert PATCHER.why_not(dataclasses.replace(facts(), layers=None)).impls == {}
    plan(impl("SiluAndMul"))
    (why,) = PATCHER.why_not(facts()).impls.values()
    assert "through the op silu_and_mul" in why and "provide an OpImpl" in why


@pytest.mark.parametrize(
    ("env", "note"),
    [
        ({}, None),
        ({"VLLM_FL_OOT_ENABLED": "0"}, "VLLM_FL_OOT_ENABLED=0"),
        ({"VLLM_FL_OOT_BLACKLIST": "test_mixer"}, "oot_blacklist lists test_mixer"),
        ({"VLLM_FL_OOT_WHITELIST": "SiluAndMul"}, "oot_whitelist does not list it"),
    ],
)
def test_the_lists_leave_it_to_vllm(plan: Make, env: dict[str, str], note: str | None) -> None:
    plan(impl())
    found = PATCHER.why_not(facts(env=env)).ops
    assert found == ({"Mixer": note} if note else {})


@pytest.mark.parametrize(
    ("mode", "custom_ops", "note"),
    [
        ("eager", ("all",), ""),
        ("eager", ("none",), "custom_ops has none"),
        ("eager", ("none", "+test_plain"), ""),
        ("eager", ("all", "-test_plain"), "custom_ops has -test_plain"),
        ("compiled", ("none",), ""),
        ("compiled", ("none", "-test_plain"), "custom_ops has -test_plain"),
    ],
)
def test_custom_ops_speaks_of_custom_ops(
    plan: Make, mode: Any, custom_ops: tuple[str, ...], note: str
) -> None:
    made = plan(impl(), impl("Plain", "OwnPlain"))
    engine = facts(mode, custom_ops=custom_ops)
    assert PATCHER.why_not(engine).ops == ({"Plain": note} if note else {})
    assert PATCHER.configure(made, None, {}) == ["test_plain"]
    rope = plan(impl("MRotaryEmbedding", "OwnRope"))  # also the name of an op's layer
    assert PATCHER.configure(rope, None, {}) == []
    assert {"mamba_mixer2", "MambaMixer2"} <= PATCHER.layer_names(), "not imported yet"


def loaded(made: Plan, *layers: torch.nn.Module) -> Any:
    """How many layers of a model come from the plan."""
    worker = type("Worker", (), {"get_model": lambda self: torch.nn.Sequential(*layers)})
    engine = engine_of(made, worker())
    PATCHER.loaded(engine)
    return PATCHER.report(engine)["layers"]


def test_layers_of_the_model_are_counted_and_their_calls(
    plan: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = dataclasses.replace(plan(impl()), counts_calls=True)
    with PATCHER.building(engine_of(made)):
        built = Mixer(), BigMixer(), torch.nn.Sequential(Mixer())
    wrapper = torch.nn.Module()
    wrapper.base_layer = built[0]
    assert loaded(made, *built, wrapper) == {"Mixer": 2}
    assert built[0](1) == 2 and made.calls == {("Mixer", "vendor.acme"): 1}
    assert "LoRA wraps 1 of them" in caplog.text


def test_a_layer_that_is_vllms_all_the_same_is_said(
    plan: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = plan(impl())
    assert loaded(made, Mixer(), BigMixer()) == {"Mixer": 0}
    assert "is not used for layer 'Mixer' in 1 places, which keep vLLM's class: 0" in caplog.text
    assert made.fallbacks == {("Mixer", "stock.vllm"): 1}
    with pytest.raises(VllmFLError, match="Strict mode"):
        loaded(plan(impl(), strict=True), Mixer())


def test_rank_0_says_what_serves(plan: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_fl")
    made = plan(impl(), impl("BigMixer", "OwnBig"))
    assert loaded(made, OwnMixer()) == {"Mixer": 1, "BigMixer": 0}
    assert "Layer Mixer: 1 in this model, by 'vendor.acme'" in caplog.text
    assert "Layer BigMixer: this model has none, so 'vendor.acme' does not run" in caplog.text
    engine = engine_of(made, type("Hidden", (), {})())
    PATCHER.loaded(engine)
    assert PATCHER.report(engine) == {"layers": {}} and "are not counted" in caplog.text
