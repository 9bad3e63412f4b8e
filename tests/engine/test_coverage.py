"""`vllm-fl tune --profile` with real engines: the ops of a tiny model, by implementation."""

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

pytestmark = pytest.mark.slow


@pytest.fixture
def coverage(model: Callable[[str], Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`coverage(*arguments)`: the command's result for a tiny model under the reference plan."""

    def run(*arguments: str) -> dict[str, Any]:
        variables = {"VLLM_FL_PREFER": "reference", BIND: str(min(cores()))}
        command = [sys.executable, "-m", "vllm_fl_tools.cli", "tune", "--profile", "--json"]
        done = subprocess.run(
            [*command, "--model", model("qwen3"), "--max-model-len", "64", *arguments],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)["coverage"]
        assert [phase["kind"] for phase in report["phases"]] == ["decode", "prefill"]
        for phase in report["phases"]:
            assert phase["total_us"] > 0
            assert sum(row["share"] for row in phase["rows"]) == pytest.approx(1)
        return report

    return run


def by_op(phase: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["op"] or row["name"], row["impl"]): row for row in phase["rows"]}


def test_the_ops_of_an_eager_engine(coverage: Callable[..., dict[str, Any]]) -> None:
    report = coverage("--enforce-eager", "--dtype", "float32")
    assert report["mode"] == "eager" and report["arguments"][-3:] == [
        "--enforce-eager",
        "--dtype",
        "float32",
    ]
    for phase in report["phases"]:
        rows = by_op(phase)
        # Two layers with four norms each (two of query and key), and the last norm.
        assert rows["rms_norm", "reference.torch"]["calls"] == 9
        assert rows["silu_and_mul", "reference.torch"]["calls"] == 2
        assert rows["rotary_embedding", "reference.torch"]["reached"] == "yes"
        attention = rows["attention_backend", "stock"]
        assert attention["reached"] == "no"
        assert any(not row["op"] for row in phase["rows"])
