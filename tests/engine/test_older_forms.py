"""Plugins in older forms in an eager engine: vendor folders, and the first signatures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine_run import Job
from engines import IN_ONE_PROCESS, Model, Plugin, Runner, batches, difference, run

import envs

pytestmark = pytest.mark.slow

FOLDERS = {
    "rms_norm": "musa",  # a backend method that gets the layer and writes in place
    "rotary_embedding": "iluvatar",  # a function of the layer, without `rotary_interleaved`
    "silu_and_mul": "musa",
}
"""Op -> one of two vendors in the form of vllm-plugin-FL's vendor folders."""

SEEDS = dict.fromkeys(FOLDERS, "seeds")
"""Functions with the parameters of the first documentation."""


@pytest.mark.parametrize(
    ("eager", "order"),
    [(True, FOLDERS), (True, SEEDS), (False, SEEDS)],
    ids=["folders", "seeds-eager", "seeds-compiled"],
)
def test_they_are_verified_planned_and_called(
    eager: bool, order: dict[str, str], engine: Runner, model: Model, plugin: Plugin, tmp_path: Path
) -> None:
    variables = plugin("seeds_signatures")
    if order is FOLDERS:  # by their entry points
        wheels = [str(envs.wheel(envs.PLUGINS / f"fl-form-{name}")) for name in {*order.values()}]
        options = ("-q", "--no-deps", "--no-index", "--target", str(tmp_path))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
        variables = {"PYTHONPATH": str(tmp_path)}
    # In float32 another order of operations does not change any token.
    job = Job(str(model("qwen3")), batches(), eager=eager, options={"dtype": "float32"})
    per_op = ";".join(f"{op}=vendor:{vendor}" for op, vendor in order.items())
    debug = {"VLLM_FL_DISPATCH_DEBUG": "1", "VLLM_FL_PER_OP": per_op}
    result = run(job, **debug, **IN_ONE_PROCESS, **variables)
    (report,) = result["report"]
    for op, vendor in order.items():
        assert report["ops"][op]["impl"] == f"vendor.{vendor}", result["log"][-6000:]
        assert report["calls"][op][f"vendor.{vendor}"] > 0
    assert report["fallbacks"] == report["demotions"] == {}
    assert "has no parameter " not in result["log"]  # the model passes none that they lack
    stock = engine("qwen3", "stock-float32", eager)
    assert result["tokens"] == stock["tokens"]
    assert difference(stock, result) <= 1e-4
