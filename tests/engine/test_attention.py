"""The attention backend: the plan's; or vLLM's, if set by the user or if no plugin provides one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import forked
import pytest
import tiny_model
from engine_run import STOCK, EngineFailed, Job
from engines import run

HERE = Path(__file__).parent
PLUGIN = {"PYTHONPATH": str(HERE / "plugins"), "VLLM_FL_PLUGIN_MODULES": "counting_attention"}
COUNTING = "counting_backend.CountingBackend"
STOCK_PATH = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
LAYERS, NEW_TOKENS = 2, 6

CASES: dict[str, dict[str, Any]] = {
    "planned": {},
    "configured": {"options": {"attention_backend": "CPU_ATTN"}},
    "refuses the model": {"env": {"COUNTING_HEAD_SIZE": "128"}},
    "refuses a layer": {"request": {"has_sink": True}},
    "refuses a layer, strict": {"env": {"VLLM_FL_STRICT": "1"}, "request": {"has_sink": True}},
    "policy says stock": {"env": {"VLLM_FL_PER_OP": "attention_backend=stock"}},
    "vendor denied": {"env": {"VLLM_FL_DENY_VENDORS": "counting"}},
    "misnamed": {"env": {"COUNTING_CLASS": "counting_backend.MisnamedBackend"}},
    "absent": {"env": {"COUNTING_CLASS": "counting_backend.Absent"}},
    "no backend": {"env": {"COUNTING_CLASS": "pathlib.Path"}},
}


def ask(model: Path, cases: list[dict[str, Any]], **variables: str) -> list[dict[str, Any]]:
    script = (HERE / "attention_choices.py").read_text()
    request = json.dumps({"model": str(model), "cases": cases})
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **PLUGIN, **variables}
    done = forked.run(script, request, env=env)
    log = done.stdout + done.stderr
    marked = [line for line in done.stdout.splitlines() if line.startswith("CHOSEN ")]
    assert len(marked) == len(cases), log
    return [{**json.loads(line.removeprefix("CHOSEN ")), "log": log} for line in marked]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    model = tiny_model.make(tmp_path_factory.mktemp("model"))
    return dict(zip(CASES, ask(model, list(CASES.values())), strict=True))


def test_the_plan_names_it_and_vllm_is_given_its_class(chosen: dict[str, Any]) -> None:
    case = chosen["planned"]
    assert case["path"] == COUNTING
    assert case["planned"] == "vendor.counting"
    assert case["faults"] == []


@pytest.mark.slow
def test_the_backend_set_in_vllms_arguments_wins_and_is_reported(chosen: dict[str, Any]) -> None:
    case = chosen["configured"]
    assert case["path"] == STOCK_PATH
    assert case["reason"] == "attention_config.backend is CPU_ATTN"
    assert case["planned"] == "stock"


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


@pytest.mark.parametrize("which", ["policy says stock", "vendor denied"])
@pytest.mark.slow
def test_the_policy_decides(chosen: dict[str, Any], which: str) -> None:
    assert chosen[which]["planned"] == "stock"
    assert chosen[which]["path"] == STOCK_PATH


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ("misnamed", "get_name() is 'COUNTING', which is not a key of vLLM's AttentionBackendEnum"),
        ("absent", "has no attribute 'Absent'"),
        ("no backend", "is not an AttentionBackend of vLLM: it has no get_name"),
    ],
)
@pytest.mark.slow
def test_a_class_that_cannot_be_used_is_a_fault_at_start(
    chosen: dict[str, Any], which: str, why: str
) -> None:
    (fault,) = chosen[which]["faults"]
    assert why in fault
    assert chosen[which]["path"] == STOCK_PATH


def job_for(folder: Path) -> Job:
    batches = [[[3, 17, 170, 99, 41, 7, 250, 12]]]
    return Job(str(tiny_model.make(folder)), batches, new_tokens=NEW_TOKENS)


@pytest.mark.slow
def test_an_engine_with_a_faulty_backend_runs_on_stock(tmp_path: Path) -> None:
    job = job_for(tmp_path)
    broken = {**PLUGIN, "COUNTING_CLASS": "counting_backend.MisnamedBackend"}
    ours = run(job, timeout=300, **broken, VLLM_FL_PREFER="reference")
    assert ours["report"][0]["ops"]["attention_backend"]["impl"] == "stock"
    assert "COUNTING" in ours["report"][0]["demotions"]["attention_backend"]["vendor.counting"]
    assert "Implementation 'vendor.counting' failed for op 'attention_backend'" in ours["log"]
    assert ours["tokens"] == run(job, timeout=300, **STOCK)["tokens"]


@pytest.mark.slow
def test_an_engine_ends_at_startup_if_its_backend_is_wrong(tmp_path: Path) -> None:
    files = {"COUNTING_CLASS": "counting_backend.SwappingBackend", "COUNTING_FILE": "/dev/null"}
    with pytest.raises(EngineFailed) as raised:
        run(job_for(tmp_path), timeout=300, **PLUGIN, **files, VLLM_FL_PREFER="reference")
    failed = "rank 0: implementation 'vendor.counting' failed for op 'attention_backend': model."
    assert f"vllm-fl: engine startup failed: {failed}" in raised.value.log
    assert "VLLM_FL_PER_OP='attention_backend=stock' selects vLLM's code" in raised.value.log
