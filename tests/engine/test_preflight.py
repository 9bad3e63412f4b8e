"""Startup verification names a wrong kernel, and the engine serves without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_run import BIND, EngineFailed, Job
from engines import IN_ONE_PROCESS, Model, Plugin, Runner, assert_same_bits, batches, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

LIVE_ONLY = "silu_and_mul=vendor:liveonly|reference"


def test_a_compiled_engine_disables_what_is_wrong_on_the_loaded_model_by_its_layer(
    engine: Runner, model: Model, plugin: Plugin
) -> None:
    job = Job(str(model("qwen3")), batches(), eager=False)
    orders = {"VLLM_FL_PREFER": "reference", "VLLM_FL_PER_OP": LIVE_ONLY}
    result = run(job, VLLM_FL_DISPATCH_DEBUG="1", **orders, **plugin("live_only"))
    report = result["report"][0]
    assert (
        "in layer model.layers.0.mlp.act_fn, x (256, "
        in report["demotions"]["silu_and_mul"]["vendor.liveonly"]
    )
    assert report["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert report["calls"]["silu_and_mul"].keys() == {"reference.torch"}
    assert report["fallbacks"] == {}, "the layers are bound to what serves"
    assert f"digest {report['digest']}" in result["log"]
    stock = engine("qwen3", "stock-native", False)
    assert_same_bits(stock, result)
    assert result["kv_blocks"] == stock["kv_blocks"]


def test_quickstart_finds_a_wrong_kernel_that_nobody_verified(plugin: Plugin) -> None:
    """Control for the quickstart: its measurement does reveal a wrong kernel."""
    done = subprocess.run(
        [sys.executable, ROOT / "quickstart.py", "--only-plan"],
        env={
            **os.environ,
            **IN_ONE_PROCESS,
            **plugin("wrong_halves"),
            "VLLM_FL_PREFLIGHT": "off",
            "VLLM_FL_PER_OP": "silu_and_mul=vendor:wrong",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FINDING: log-probabilities differ: vllm-fl" in done.stdout
    assert re.search(r"silu_and_mul +vendor\.wrong ", done.stdout)


def test_a_rank_that_dies_while_it_verifies_ends_the_start(model: Model, plugin: Plugin) -> None:
    job = Job(str(model("qwen3")), batches(), options={"tensor_parallel_size": 2})
    two_ranks = {BIND: "0|1", "VLLM_FL_PER_OP": "silu_and_mul=vendor:rankone|reference"}
    start = time.monotonic()
    with pytest.raises(EngineFailed) as failure:
        run(job, RANK_ONE="dies", **two_ranks, **plugin("rank_one"))
    # A hang would last half an hour in vLLM; the run's limit ends it first.
    assert time.monotonic() - start < 600
    assert " died" in failure.value.log or "one of them is gone" in failure.value.log
