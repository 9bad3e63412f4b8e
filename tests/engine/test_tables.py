"""A table in a real engine: its rows steer decode and prefill apart, on this machine alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_run import EngineFailed, Job
from engines import run
from measured_here import measured

from vllm_fl.settings.table import Row, read_table

OP = "silu_and_mul"
COUNTED = {"VLLM_FL_DISPATCH_DEBUG": "1", "VLLM_FL_TABLE_UNACCEPTED": "1"}
PREFILL, DECODED = 40, 4
BATCHES = [[[(7 * n) % 500 + 3 for n in range(PREFILL)]]]
LAYERS = 2


@pytest.fixture
def table(model: Callable[[str], Path], tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`table(**fields)`: the variables under which a table of this machine acts.

    Calls of up to 16 tokens get the CPU's kernel, larger ones what all have without a table.
    """
    whole = measured(str(model("qwen3")), OP)

    def written(**changed: Any) -> dict[str, str]:
        path = tmp_path / "table.json"
        path.write_text(replace(whole, **changed).text)
        return {"VLLM_FL_TABLE": str(path), **COUNTED}

    return written


@pytest.mark.slow
def test_a_table_steers_decode_and_prefill_apart(
    model: Callable[[str], Path], table: Callable[..., dict[str, str]]
) -> None:
    variables = table()
    job = Job(str(model("qwen3")), BATCHES, new_tokens=DECODED, logits=False)
    ours = run(job, **variables)
    report = ours["report"][0]
    assert report["table"]["acts"] and report["table"]["left_out"] == {}, report["table"]
    calls = report["calls"][OP]
    assert calls["vendor.cpu"] == LAYERS * (DECODED - 1)
    assert calls["reference.torch"] >= LAYERS
    file, digest = variables["VLLM_FL_TABLE"], report["table"]["digest"]
    assert f"table {file} ({digest})" in ours["log"]

    elsewhere = table(identity={"device": "NVIDIA H200"})
    other = run(job, **elsewhere)
    assert not other["report"][0]["table"]["acts"]
    assert "vendor.cpu" not in other["report"][0]["calls"][OP]
    assert other["report"][0]["digest"] != report["digest"]
    assert other["log"].count("it was measured with NVIDIA H200") == 1
    assert "Going on without a table" in other["log"]


@pytest.mark.slow
def test_strict_mode_ends_the_start_on_another_machine(
    model: Callable[[str], Path], table: Callable[..., dict[str, str]]
) -> None:
    elsewhere = table(identity={"device": "NVIDIA H200"})
    with pytest.raises(EngineFailed) as failure:
        run(Job(str(model("qwen3")), BATCHES), VLLM_FL_STRICT="1", **elsewhere)
    assert "vllm-fl ends the start" in failure.value.log
    assert "it was measured with NVIDIA H200" in failure.value.log


@pytest.mark.slow
def test_a_table_that_makes_decoding_slower_is_turned_down_and_does_not_act(
    model: Callable[[str], Path], plugin: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    """`--accept` in engines: of a model that takes fewer tokens than it would like to send."""
    folder, path = str(model("qwen3")), tmp_path / "table.json"
    loaded = plugin("sleeping")
    search = os.pathsep.join([loaded["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **loaded, "PYTHONPATH": search}
    whole = measured(folder, OP, env=env)
    rows = (Row(16, "vendor.sleeping"), Row(256, "default"))
    path.write_text(replace(whole, ops={OP: replace(whole.ops[OP], rows=rows)}).text)

    command = ("tune", "--accept", str(path), "--model", folder, "--rounds", "2")
    done = subprocess.run(
        [sys.executable, "-m", "vllm_fl.cli", *command],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    verdict = read_table(str(path)).accepted
    assert verdict is not None and not verdict.accepted, done.stderr
    assert done.returncode == 1
    assert verdict.reason.startswith("slower: decode, batch 1 at ")
    phases = ["decode, batch 1", "decode, batch 8", "prefill, 32 tokens", "prefill, 256 tokens"]
    assert [f.removesuffix(": ratio") for f in verdict.figures if f.endswith("ratio")] == phases
    assert "prefill, 256 tokens " in done.stdout and "is not accepted" in done.stdout

    served = run(Job(folder, BATCHES, logits=False), VLLM_FL_TABLE=str(path), **loaded)
    told = served["report"][0]["table"]
    assert not told["acts"] and "slower: decode, batch 1" in told["reason"], told
