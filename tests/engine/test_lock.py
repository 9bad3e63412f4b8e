"""Lock file: a matching engine serves; any other fails with the difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_run import BIND, EngineFailed, Job, cores, run
from engines import batches

from vllm_fl.settings.lock import read_lock

Models = Callable[[str], Path]

pytestmark = pytest.mark.slow


def test_an_engine_that_is_locked_starts_again_and_another_one_ends(
    model: Models, tmp_path: Path
) -> None:
    file, folder = tmp_path / "vllm-fl.lock", str(model("qwen3"))
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    words = ["--enforce-eager", "--skip-tokenizer-init", "--max-logprobs=-1"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    command = [sys.executable, "-m", "vllm_fl_tools.cli", "plan", "--model", folder, *words]
    env = {**os.environ, BIND: str(min(cores()))}  # as in `run`
    done = subprocess.run(
        [*command, "--save", str(file)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lock = read_lock(str(file))
    assert lock.result["ops"]["rms_norm"] == "vendor.cpu"
    job = Job(folder, batches()[:1], options=sizes, logits=False)
    named = {"VLLM_FL_LOCK": str(file)}
    kept = tmp_path / "chat.report.json"
    served = run(job, VLLM_FL_METRICS=str(tmp_path / "chat.prom"), **named)
    report_file = json.loads(kept.read_text())
    assert f"seed {lock.seed}" in report_file["report"]["remarks"] and report_file["lock"] == []
    assert "[FL505]" not in served["log"]
    with pytest.raises(EngineFailed) as ended:
        run(job, VLLM_FL_PREFER="reference", **named)
    line = "setting prefer is reference; the lock has nothing"
    assert "LockError" in ended.value.log and line in ended.value.log
    report = tmp_path / "warned.report.json"
    named = {
        "VLLM_FL_LOCK": f"warn:{file}",
        "VLLM_FL_METRICS": str(tmp_path / "warned.prom"),
    }
    warned = run(job, VLLM_FL_PREFER="reference", **named)
    assert any(line in difference for difference in json.loads(report.read_text())["lock"])
    assert warned["log"].count(line) == 1 and "[FL505]" in warned["log"]
    assert [len(ids) for ids in warned["tokens"]] == [8] * len(job.batches[0])
