"""The attention backend: the plan's; or vLLM's, if set by the user or if no plugin provides one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import STOCK, EngineFailed, Job
from engines import PLUGINS, REFERENCE, answer_of, run

PLUGIN = {"PYTHONPATH": str(PLUGINS), "VLLM_FL_PLUGIN_MODULES": "counting_attention"}
COUNTING = "counting_backend.CountingBackend"
STOCK_PATH = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"

CASES: dict[str, dict[str, Any]] = {
    "planned": {},
    "configured": {"options": {"attention_backend": "CPU_ATTN"}},
    "refuses the model": {"env": {"COUNTING_HEAD_SIZE": "128"}},
    "refuses a layer": {"request": {"has_sink": True}},
    "refuses a layer, strict": {"env": {"VLLM_FL_STRICT": "1"}, "request": {"has_sink": True}},
}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    model = tiny_model.make(tmp_path_factory.mktemp("model"))
    script = Path(__file__).with_name("attention_choices.py").read_text()
    found, log = answer_of(script, model, json.dumps([*CASES.values()]), **PLUGIN)
    return {name: {**case, "log": log} for name, case in zip(CASES, found["chosen"], strict=True)}


def test_the_plan_names_it_and_vllm_is_given_its_class(chosen: dict[str, Any]) -> None:
    case = chosen["planned"]
    assert (case["path"], case["planned"]) == (COUNTING, "vendor.counting")


@pytest.mark.slow
def test_the_backend_set_in_vllms_arguments_wins_and_is_reported(chosen: dict[str, Any]) -> None:
    case = chosen["configured"]
    assert (case["path"], case["planned"]) == (STOCK_PATH, "stock")
    assert case["reason"] == "attention_config.backend is CPU_ATTN"


def test_a_model_that_it_refuses_is_stock_with_its_reason(chosen: dict[str, Any]) -> None:
    case = chosen["refuses the model"]
    assert (case["path"], case["planned"]) == (STOCK_PATH, "stock")
    assert "vendor.counting: does not support this model: head size 64, only 128" in case["reason"]


@pytest.mark.slow
def test_a_layer_that_it_refuses_is_stock_and_said(chosen: dict[str, Any]) -> None:
    case = chosen["refuses a layer"]
    assert (case["path"], case["planned"]) == (STOCK_PATH, "vendor.counting")
    refused = "does not support a layer of op 'attention_backend': no MLA and no sinks"
    assert refused in case["log"]


def test_strict_mode_raises_what_a_layer_refuses(chosen: dict[str, Any]) -> None:
    assert chosen["refuses a layer, strict"]["path"].startswith(
        "AllFailedError: Implementation 'vendor.counting' does not support a layer of op 'attention"
    )


def job_for(folder: Path) -> Job:
    batches = [[[3, 17, 170, 99, 41, 7, 250, 12]]]
    return Job(str(tiny_model.make(folder)), batches, new_tokens=6)


@pytest.mark.slow
def test_an_engine_with_a_faulty_backend_runs_on_stock(tmp_path: Path) -> None:
    job = job_for(tmp_path)
    broken = {**PLUGIN, "COUNTING_CLASS": "counting_backend.MisnamedBackend"}
    ours = run(job, timeout=300, **broken, **REFERENCE)
    assert ours["report"][0]["ops"]["attention_backend"]["impl"] == "stock"
    assert "COUNTING" in ours["report"][0]["demotions"]["attention_backend"]["vendor.counting"]
    assert "Implementation 'vendor.counting' failed for op 'attention_backend'" in ours["log"]
    assert ours["tokens"] == run(job, timeout=300, **STOCK)["tokens"]


@pytest.mark.slow
def test_an_engine_ends_at_startup_if_its_backend_is_wrong(tmp_path: Path) -> None:
    files = {"COUNTING_CLASS": "counting_backend.SwappingBackend", "COUNTING_FILE": "/dev/null"}
    with pytest.raises(EngineFailed) as raised:
        run(job_for(tmp_path), timeout=300, **PLUGIN, **files, **REFERENCE)
    failed = "rank 0: implementation 'vendor.counting' failed for op 'attention_backend': model."
    assert f"vllm-fl: engine startup failed: {failed}" in raised.value.log
    assert "VLLM_FL_PER_OP='attention_backend=stock' selects vLLM's code" in raised.value.log
