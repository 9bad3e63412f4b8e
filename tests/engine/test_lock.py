"""Lock file: a matching engine serves; any other fails with the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_run import BIND, EngineFailed, Job, cores, run
from engines import Model, batches, command

from vllm_fl.settings.lock import read_lock

pytestmark = pytest.mark.slow


def test_an_engine_that_is_locked_starts_again_and_another_one_ends(
    model: Model, tmp_path: Path
) -> None:
    file, folder = tmp_path / "vllm-fl.lock", str(model("qwen3"))
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    words = ["--enforce-eager", "--skip-tokenizer-init", "--max-logprobs=-1"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    bound = {BIND: str(min(cores()))}  # as in `run`
    done = command("plan", "--model", folder, *words, "--save", file, **bound)
    assert done.returncode == 0, done.stderr
    lock = read_lock(str(file))
    assert lock.result["ops"]["rms_norm"] == "vendor.cpu"
    job = Job(folder, batches()[:1], options=sizes, logits=False)
    named = {"VLLM_FL_LOCK": str(file)}
    served = run(job, VLLM_FL_METRICS=str(tmp_path / "chat.prom"), **named)
    left = json.loads((tmp_path / "chat.report.json").read_text())
    assert f"seed {lock.seed}" in left["report"]["remarks"] and left["lock"] == []
    assert "[FL505]" not in served["log"]
    with pytest.raises(EngineFailed) as ended:
        run(job, VLLM_FL_PREFER="reference", **named)
    line = "setting prefer is reference; the lock has nothing"
    assert "LockError" in ended.value.log and line in ended.value.log
    named = {"VLLM_FL_LOCK": f"warn:{file}", "VLLM_FL_METRICS": str(tmp_path / "warned.prom")}
    warned = run(job, VLLM_FL_PREFER="reference", **named)
    left = json.loads((tmp_path / "warned.report.json").read_text())
    assert any(line in each for each in left["lock"])
    assert warned["log"].count(line) == 1 and "[FL505]" in warned["log"]
    assert [len(ids) for ids in warned["tokens"]] == [8] * len(job.batches[0])
