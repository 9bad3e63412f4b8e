"""vLLM compiler passes that find an op: the plan's changes for them, and their finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm.model_executor.layers.layernorm  # before the platform is replaced
import vllm.model_executor.layers.rotary_embedding
import vllm.platforms
from configs import engine_config
from oracle_mutants import oracle_impl
from vllm.config import CompilationMode

import vllm_fl.dispatch
from vllm_fl.contracts.binding import FusionTarget, OperatorTarget
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.carried import Carried
from vllm_fl.integration.patchers import layers
from vllm_fl.integration.planning import apply, facts_of, note_user_priority, plan_for
from vllm_fl.integration.targets import targets
from vllm_fl.plugins.registry import OpRegistry, known_contracts
from vllm_fl.settings.loading import load_settings

FLAG = "enable_qk_norm_rope_fusion"
OP = "qk_norm_rope"
MATCHES_STOCK = f"vLLM's pass for {OP} matches only vLLM's implementation"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on an NVIDIA or AMD GPU, with implementations of the op and of its parts."""
    registry = OpRegistry()
    contracts = known_contracts().contracts
    ops = OP, "rms_norm", "rotary_embedding"
    registry.register_many([oracle_impl(contracts[op]) for op in ops])
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", OpManager(registry))
    monkeypatch.setattr(layers, "foreign_ops", dict)
    on_platform(monkeypatch, is_cuda_alike=lambda: True)


def on_platform(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    platform = SimpleNamespace(vllm_fl_platform="cuda", device_type="cpu", **fields)
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)


def configured(**fields: Any) -> Any:
    """A configuration as vLLM passes it before its defaults, then with them."""
    passes = {FLAG: None, **fields.pop("pass_config", {})}
    fields = {"mode": CompilationMode.VLLM_COMPILE, "custom_ops": ["none"], **fields}
    config = engine_config(Carried(), pass_config=passes, **fields)
    note_user_priority(config)
    passes = config.compilation_config.pass_config
    setattr(passes, FLAG, getattr(passes, FLAG) or False)
    return config


def planned(**fields: Any) -> tuple[Plan, Any]:
    """The plan for a configuration, and the configuration with its changes."""
    config = configured(**fields)
    plan = plan_for(facts_of(config))
    apply(plan, config)
    return plan, config


def test_a_planned_op_has_its_pass_on_and_the_pass_finds_vllms_own_rope() -> None:
    plan, config = planned()
    entries, compilation = plan.entries, config.compilation_config
    assert entries[OP].label == entries["rms_norm"].label == "vendor.acme"  # a norm is an IR op
    assert entries["rotary_embedding"].label == "stock"
    assert entries["rotary_embedding"].note == MATCHES_STOCK
    assert getattr(compilation.pass_config, FLAG) is True
    assert compilation.custom_ops == ["none", "+rotary_embedding"]
    assert plan_for(facts_of(config)).entries["rotary_embedding"].note, "and so says the worker"


def test_the_pass_is_turned_off_again_when_the_op_failed_and_the_rope_is_planned() -> None:
    _, config = planned()
    plan = plan_for(facts_of(config), {(OP, "vendor.acme"): "failed"})
    apply(plan, config)
    assert getattr(config.compilation_config.pass_config, FLAG) is False
    assert plan.entries["rotary_embedding"].label == "vendor.acme"


def test_an_op_that_is_stock_at_some_sizes_is_stock_at_all(tmp_path: Path) -> None:
    file = tmp_path / "rows.yaml"
    file.write_text(f'op_backends: {{{OP}: {{"<=16": vendor, rest: stock}}}}')
    config = configured()
    facts = replace(facts_of(config), settings=load_settings({"VLLM_FL_CONFIG": str(file)}))
    note = plan_for(facts).entries[OP].note
    assert note == "vLLM's pass inserts it at all sizes, but some sizes are stock"


def test_a_pass_that_the_user_turned_on_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", f"{OP}=stock")
    plan, config = planned(pass_config={FLAG: True})
    assert plan.is_stock(OP) and getattr(config.compilation_config.pass_config, FLAG) is True


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"mode": CompilationMode.NONE, "custom_ops": []}, "only in compiled mode"),
        ({"pass_config": {FLAG: False}}, f"pass_config.{FLAG} is false"),
        ({"custom_ops": ["none", "-rotary_embedding"]}, "custom_ops has -rotary_embedding"),
    ],
)
def test_where_the_pass_cannot_find_it_the_op_is_stock(fields: Any, why: str) -> None:
    plan, config = planned(**fields)
    assert plan.is_stock(OP) and plan.entries[OP].note.startswith(why)
    assert getattr(config.compilation_config.pass_config, FLAG) is False
    assert plan.entries["rotary_embedding"].note != MATCHES_STOCK
    if "-rotary_embedding" in (custom_ops := fields.get("custom_ops", ())):
        assert config.compilation_config.custom_ops == custom_ops


@pytest.mark.parametrize("fields", [{}, {"is_cuda_alike": lambda: False}])
def test_another_platform_has_no_such_pass(monkeypatch: pytest.MonkeyPatch, fields: Any) -> None:
    on_platform(monkeypatch, **fields)
    plan, config = planned()
    assert plan.entries[OP].note == "vLLM has no pass for it on this platform"
    assert plan.entries["rotary_embedding"].label == "vendor.acme"
    assert getattr(config.compilation_config.pass_config, FLAG) is False


def test_what_a_pass_puts_into_graphs_is_an_operator_of_the_same_binding() -> None:
    for op, _ in targets(known_contracts().bindings, FusionTarget):
        assert any(
            isinstance(target, OperatorTarget) for target in known_contracts().bindings[op].targets
        )


def test_vllms_own_pass_finds_it_and_ours_runs_or_is_said_not_to() -> None:
    here = Path(__file__).parent
    shared = here.parents[2] / "vllm-fl-core" / "tests", here.parent
    path = os.pathsep.join([*map(str, shared), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(here / "fused.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    there, elsewhere, joined = json.loads(done.stdout.splitlines()[-1])
    assert not joined, "a model's graphs have more inputs than who loads them passes"
    assert there["sites"] == {"graphs": 1, "found": 1}
    assert there["fused"] == [False, True]
    assert 0 < there["apart"] < 0.04, "two roundings of bfloat16 less"
    assert "1 matches, by 'vendor.acme'" in there["said"]
    assert elsewhere["sites"] == {"graphs": 1, "found": 0}
    assert elsewhere["fused"] == [False, False]
    assert elsewhere["apart"] == 0
    assert "found a match (graphs: 1), so 'vendor.acme'" in elsewhere["said"]
