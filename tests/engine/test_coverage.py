"""`vllm-fl tune --profile` with a real engine: the ops of a tiny model, by implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_run import BIND, cores
from engines import REFERENCE, Model, command

pytestmark = pytest.mark.slow


def test_the_ops_of_an_eager_engine(model: Model, tmp_path: Path) -> None:
    arguments = ["--enforce-eager", "--dtype", "float32"]
    words = ("tune", "--profile", "--json", "--model", model("qwen3"), "--max-model-len", "64")
    variables = {**REFERENCE, BIND: str(min(cores()))}
    done = command(*words, *arguments, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["coverage"]
    assert report["mode"] == "eager" and report["arguments"][-3:] == arguments
    assert [phase["kind"] for phase in report["phases"]] == ["decode", "prefill"]
    for phase in report["phases"]:
        assert phase["total_us"] > 0
        assert sum(row["share"] for row in phase["rows"]) == pytest.approx(1)
        rows = {(row["op"] or row["name"], row["impl"]): row for row in phase["rows"]}
        # Two layers with four norms each (two of query and key), and the last norm.
        assert rows["rms_norm", "reference.torch"]["calls"] == 9
        assert rows["silu_and_mul", "reference.torch"]["calls"] == 2
        assert rows["rotary_embedding", "reference.torch"]["reached"] == "yes"
        assert rows["attention_backend", "stock"]["reached"] == "no"
        assert any(not row["op"] for row in phase["rows"])
