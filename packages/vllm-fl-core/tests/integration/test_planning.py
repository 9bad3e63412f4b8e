"""From a configuration to facts and a plan: what is read, carried, and kept of user settings."""

from __future__ import annotations

import copy
import json
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm.envs
import vllm.model_executor.layers.layernorm  # before the platform is replaced
import vllm.platforms
from builders import extended, registry_with_settings, silu
from configs import engine_config
from vllm.config import CompilationMode

import vllm_fl.dispatch
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.errors import SettingsError, StartError
from vllm_fl.integration import carried, planning
from vllm_fl.integration.carried import Carried
from vllm_fl.integration.compat import hide_our_variables
from vllm_fl.integration.patchers import layers
from vllm_fl.integration.planning import apply, facts_of, note_user_priority, plan_for
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.settings.loading import load_settings


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpManager]:
    """A process of an engine with one installed implementation."""
    registry = OpRegistry()
    registry.register_impl(silu("vendor.acme"))
    manager = OpManager(registry)
    monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
    monkeypatch.setattr(layers, "foreign_ops", dict)
    monkeypatch.setattr(
        vllm.platforms,
        "_current_platform",
        SimpleNamespace(vllm_fl_platform="cpu", device_type="cpu"),
    )
    return manager


def test_the_facts_of_a_model() -> None:
    config = engine_config(
        intermediate_size=1536,
        custom_ops=["none", "-silu_and_mul"],
        backend=SimpleNamespace(name="TRITON_ATTN"),
        tensor_parallel_size=2,
        ir_op_priority={"rms_norm": ["native"]},
    )
    note_user_priority(config)
    facts = facts_of(config)
    assert facts.mode == "eager" and facts.custom_ops == ("none", "-silu_and_mul")
    assert facts.sizes is not None and facts.sizes.intermediate == 768
    assert facts.attention is not None and facts.attention.num_heads == 4
    assert facts.attention_backend == "TRITON_ATTN"
    assert facts.ir_priority == {"rms_norm": ["native"], "fused_add_rms_norm": []}
    assert facts_of(engine_config(mode=CompilationMode.VLLM_COMPILE)).mode == "compiled"
    assert facts_of(engine_config(mode=CompilationMode.NONE)).mode == "eager"
    config.model_config = None
    facts = facts_of(config)
    assert (facts.dtype, facts.sizes, facts.attention) == (None, None, None)


def test_an_engine_that_nothing_verifies_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same if batch invariance is required, with any VLLM_FL_PREFLIGHT."""

    def prefer(kind: str, **env: str) -> Any:
        settings = load_settings({"VLLM_FL_PREFER": kind, **env})
        monkeypatch.setattr(planning, "_settings_of", lambda config: settings)
        return facts_of(engine_config())

    with pytest.raises(StartError, match="no loaded plugin verifies kernels: pip install"):
        planning.refuse_unverified(prefer("vendor"))
    off = prefer("vendor", VLLM_FL_PREFLIGHT="off")
    planning.refuse_unverified(off)
    assert plan_for(off).entries["silu_and_mul"].label == "vendor.acme"
    assert plan_for(replace(off, batch_invariant=True)).entries["silu_and_mul"].label == "stock"
    planning.refuse_unverified(prefer("stock"))


@pytest.mark.parametrize("entry", [{"plan": "x"}, {"settings": {}}, {1: "stock"}, 1], ids=str)
def test_only_orders_can_be_written_by_hand(entry: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        facts_of(engine_config(entry))
    assert caught.value.origin == "--additional-config.vllm_fl"


def test_an_order_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", "silu_and_mul=stock")
    config = engine_config({"silu_and_mul": "vendor"})
    assert plan_for(facts_of(config)).entries["silu_and_mul"].label == "vendor.acme"
    sent = pickle.loads(pickle.dumps(config.additional_config["vllm_fl"]))
    assert facts_of(engine_config(sent)).settings == facts_of(config).settings


@pytest.mark.parametrize("send", [copy.deepcopy, lambda entry: pickle.loads(pickle.dumps(entry))])
def test_another_process_has_them_too(send: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    config = engine_config()
    read = facts_of(config).settings
    monkeypatch.delenv("VLLM_FL_PREFER")
    there = engine_config(send(config.additional_config["vllm_fl"]))
    assert facts_of(there).settings == read
    assert there.additional_config == config.additional_config
    entry = config.additional_config["vllm_fl"]
    assert json.loads(json.dumps(entry)) == dict(entry), "vLLM hashes it as JSON"


def test_two_engines_of_one_process_have_each_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []
    for prefer in ("vendor", "reference"):
        monkeypatch.setenv("VLLM_FL_PREFER", prefer)
        configs.append(engine_config())
        facts_of(configs[-1])
    preferred = [facts_of(config).settings.policy.prefer for config in configs]
    assert preferred == ["vendor", "reference"]


def test_a_sealed_configuration_is_given_what_the_process_has(
    process: OpManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    config = engine_config()
    facts_of(config)
    carried.seal(config, "digest")
    assert config.additional_config == {"vllm_fl": {"plan": "digest"}}
    monkeypatch.setenv("VLLM_FL_PREFER", "no such kind")  # settings are not read again
    assert process.settings is not None
    assert facts_of(config).settings == process.settings


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_FL_FLAGOS_WHITELIST", "0"),
        ("VLLM_FL_FLAGOS_BLACKLIST_APPEND", "0"),
        ("USE_FLAGGEMS", "0"),
        ("VLLM_FL_PREFER", "vendor"),
        ("VLLM_FL_PER_OP", "rms_norm=vendor"),
    ],
)
def test_a_setting_leaves_vllms_compile_key_alone(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", OpManager(registry_with_settings()))
    plain = dict(vllm.envs.environment_variables)

    def factors() -> dict[str, object]:
        """A worker's contribution to the compile key, with its plugins loaded."""
        monkeypatch.setattr(vllm.envs, "environment_variables", dict(plain))
        hide_our_variables()
        planning.load_plugins(engine_config())
        return vllm.envs.compile_factors()

    unset = factors()
    monkeypatch.setenv(variable, value)
    assert factors() == unset


def test_an_object_that_cannot_carry_the_digest_is_refused() -> None:
    config = engine_config()
    config.additional_config = object()
    with pytest.raises(SettingsError, match="got an object of class object"):
        note_user_priority(config)


def reason(entry: Carried | None = None, **fields: Any) -> tuple[str, str]:
    """(label, reason) of `silu_and_mul` in the plan."""
    config = engine_config(entry, **fields)
    note_user_priority(config)
    chosen = plan_for(facts_of(config)).entries["silu_and_mul"]
    return chosen.label, chosen.reason


@pytest.mark.parametrize(
    ("custom_ops", "expected"),
    [
        ([], ("vendor.acme", "the order lists vendor")),
        (["none"], ("stock", "custom_ops has none")),
        (["none", "+silu_and_mul"], ("vendor.acme", "the order lists vendor")),
        (["all", "-silu_and_mul"], ("stock", "custom_ops has -silu_and_mul")),
    ],
    ids=str,
)
def test_custom_ops_of_the_user_stand(custom_ops: list[str], expected: tuple[str, str]) -> None:
    assert reason(custom_ops=custom_ops) == expected
    if custom_ops == ["none"]:  # in compiled mode this is vLLM's default, not the user's setting
        compiled = reason(custom_ops=custom_ops, mode=CompilationMode.VLLM_COMPILE)
        assert compiled[0] == "vendor.acme"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"VLLM_FL_OOT_ENABLED": "0"}, "VLLM_FL_OOT_ENABLED=0"),
        ({"VLLM_FL_OOT_BLACKLIST": "SiluAndMul"}, "oot_blacklist lists SiluAndMul"),
        ({"VLLM_FL_OOT_WHITELIST": "RMSNorm"}, "oot_whitelist does not list it"),
    ],
)
@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.VLLM_COMPILE])
@pytest.mark.parametrize("listed", [{}, {"VLLM_FL_PER_OP": "silu_and_mul=vendor"}])
def test_lists_leave_a_layer_to_vllm(
    variables: dict[str, str], why: str, listed: dict[str, str], mode: CompilationMode
) -> None:
    settings = load_settings(variables | listed, platform="cpu")
    assert reason(Carried(settings), mode=mode) == ("stock", why)


def test_layers_that_are_off_are_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_FL_OOT_ENABLED", "0")
    config = engine_config()
    for _ in range(2):  # vLLM calls this repeatedly
        facts_of(config)
    (record,) = [each for each in caplog.records if "is disabled" in each.getMessage()]
    assert record.levelname == "INFO" and "VLLM_FL_OOT_ENABLED=false" in record.getMessage()


def test_a_layer_of_another_plugins_is_left_to_it_until_the_op_is_ordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = {"silu_and_mul": {"SiluAndMul": "acme.Silu of acme 1"}}
    monkeypatch.setattr(layers, "foreign_ops", lambda: theirs)
    label, why = reason()
    assert label == "foreign" and why.startswith("layer SiluAndMul is replaced by acme.Silu of")
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    assert reason()[0] == "foreign"
    monkeypatch.setenv("VLLM_FL_PER_OP", "silu_and_mul=vendor")
    assert reason()[0] == "vendor.acme"


@pytest.mark.parametrize(
    ("fields", "op", "why"),
    [
        ({"ir_op_priority": {"rms_norm": ["native"]}}, "rms_norm", "ir_op_priority.rms_norm is"),
        ({"backend": SimpleNamespace(name="X")}, "attention_backend", "attention_config.backend"),
    ],
)
def test_a_setting_of_vllm_is_the_reason(fields: Any, op: str, why: str) -> None:
    config = engine_config(**fields)
    note_user_priority(config)
    assert plan_for(facts_of(config)).entries[op].note.startswith(why)


def test_vllms_batch_invariant_mode_keeps_its_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has norms for this mode; our other ops must be measured."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    extended(vllm_fl.dispatch.get_default_manager())
    facts = facts_of(engine_config())
    entries = plan_for(facts).entries
    for op in ("rms_norm", "qk_norm_rope"):
        assert entries[op].note.startswith("VLLM_BATCH_INVARIANT requires vLLM's own")
    assert entries["silu_and_mul"].label == "vendor.acme", "until the start has measured it"
    monkeypatch.setenv("VLLM_FL_PREFLIGHT", "off")
    facts = facts_of(engine_config())
    entry = plan_for(facts).entries["silu_and_mul"]
    assert entry.label == "stock"
    assert "BATCH_INVARIANT=1 is set, and VLLM_FL_PREFLIGHT=off does not measure" in entry.reason


def test_a_wrong_setting_ends_a_start_with_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "vendr")
    with pytest.raises(SettingsError) as caught:
        facts_of(engine_config())
    error = caught.value
    assert not isinstance(error, ValueError), "which vLLM's configuration makes its own error of"
    assert (error.code, error.key) == ("FL102", "prefer")
    assert str(error).endswith("Did you mean 'vendor'? [FL102]")
    text = "".join(traceback.format_exception(error))
    assert text.count("Traceback (most recent call last)") == 1
    assert "`vllm-fl explain FL102`" in text


def test_only_what_we_turned_on_is_turned_off_again() -> None:
    config = engine_config(custom_ops=["none", "+silu_and_mul"])
    facts = facts_of(config)
    apply(plan_for(facts), config)
    out = {("silu_and_mul", "vendor.acme"): "failed"}
    apply(plan_for(facts, out), config)
    assert config.compilation_config.custom_ops == ["none", "+silu_and_mul"]  # user entries
    config = engine_config()
    apply(plan_for(facts_of(config)), config)
    assert config.compilation_config.custom_ops == ["+silu_and_mul"]
    apply(plan_for(facts_of(config), out), config)
    assert config.compilation_config.custom_ops == []


def test_an_op_that_the_model_cannot_have_is_not_planned_unless_the_user_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = engine_config(Carried())
    config.model_config.get_num_experts = lambda: 0
    facts = planning.facts_of(config)
    assert "swigluoai_and_mul" in facts.absent and "rms_norm" not in facts.absent
    assert "swigluoai_and_mul" not in planning.plan_for(facts).entries
    config.model_config.get_num_experts = lambda: 8
    assert not planning.facts_of(config).absent & {"swigluoai_and_mul"}
    del config.model_config.get_num_experts  # unknown
    assert "swigluoai_and_mul" in planning.plan_for(planning.facts_of(config)).entries
    monkeypatch.setenv("VLLM_FL_PER_OP", "swigluoai_and_mul=stock")
    named = engine_config(Carried())
    named.model_config.get_num_experts = lambda: 0
    assert "swigluoai_and_mul" in planning.plan_for(planning.facts_of(named)).entries


@pytest.mark.parametrize(
    ("device", "mode", "label"),
    [
        ("Acme 1", CompilationMode.VLLM_COMPILE, "vendor.acme(<=64)|stock"),
        ("Acme 1", CompilationMode.NONE, "stock"),
        ("Bolt 1", CompilationMode.VLLM_COMPILE, "stock"),
        (OSError("no driver"), CompilationMode.VLLM_COMPILE, "stock"),
    ],
    ids=str,
)
def test_an_order_for_a_device_is_planned_where_vllm_finds_it(
    device: Any, mode: CompilationMode, label: str, tmp_path: Path, monkeypatch: Any
) -> None:
    def name() -> str:
        if isinstance(device, Exception):
            raise device
        return str(device)

    file = tmp_path / "cuda.yaml"
    file.write_text(DEVICES)
    settings = load_settings({}, platform="cuda", platform_files=[("fl-acme", str(file))])
    monkeypatch.setattr(planning, "_read_settings", lambda *_: settings)
    platform: Any = vllm.platforms.current_platform
    monkeypatch.setattr(platform, "get_device_name", name, raising=False)
    facts = facts_of(engine_config(mode=mode))
    assert plan_for(facts).entries["silu_and_mul"].label == label
    assert facts.device == (device if isinstance(device, str) else "")


DEVICES = """
op_backends:
  silu_and_mul: [stock, vendor]
devices:
  - name: Acme *
    op_backends:
      silu_and_mul:
        compiled: {"<=64": vendor, rest: stock}
        measured: {date: 2026-11-25, device: Acme 1, ratio: 1.5, what: activations}
"""
