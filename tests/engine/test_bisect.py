"""`vllm-fl bisect` with real engines: a layer that is off is named, and a right plan is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_run import BIND, cores

OP, IMPL, LAYER = "silu_and_mul", "vendor.onelayer", "model.layers.1.mlp.act_fn"


@pytest.fixture
def bisect(
    model: Callable[[str], Path], plugin: Callable[..., dict[str, str]], tmp_path: Path
) -> Callable[[float], dict[str, Any]]:
    """`bisect(0.05)`: what the command says where the plugin's second layer is off by so much."""

    def run(off_by: float) -> dict[str, Any]:
        loaded = plugin("one_layer")
        path = os.pathsep.join([loaded["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
        variables = {
            **loaded,
            "PYTHONPATH": path,
            "ONE_LAYER_IS_OFF_BY": str(off_by),
            "VLLM_FL_PER_OP": f"{OP}=impl:{IMPL}",
            BIND: str(min(cores())),
        }
        done = subprocess.run(
            [sys.executable, "-m", "vllm_fl.cli", "bisect", "--model", model("qwen3"), "--json"],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == bool(found["culprits"] or found["elsewhere"])
        return found

    return run


@pytest.mark.slow
def test_the_layer_that_is_off_is_named(bisect: Callable[[float], dict[str, Any]]) -> None:
    found = bisect(0.05)
    (culprit,) = found["culprits"]
    assert culprit["ops"] == {OP: IMPL} and culprit["layers"] == [[LAYER]], found
    assert culprit["times"] > found["limit"] and not found["elsewhere"]


@pytest.mark.slow
def test_a_right_plan_is_noise(bisect: Callable[[float], dict[str, Any]]) -> None:
    found = bisect(0.0)
    assert found["culprits"] == [] and not found["elsewhere"], found
    assert 0 < found["times"] <= found["limit"] and found["engines"] == 3
