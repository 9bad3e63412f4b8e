"""A lock: what differs from it is said, by the preview as by a start; what is as locked serves."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_run import BIND, EngineFailed, Job, cores, run
from engines import answer_of, batches
from measured_here import measured

from vllm_fl.settings.lock import read_lock

BOTH = """
import importlib, io, json, os, pickle, sys
from contextlib import redirect_stderr, redirect_stdout

import torch
from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext

from vllm_fl.cli import main
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.engine import digest, identity
from vllm_fl.errors import LockError
from vllm_fl.integration.locking import facts_of_lock, labels
from vllm_fl.integration.models import model_facts
from vllm_fl.integration.verifying import Start, verified_plan
from vllm_fl.settings.lock import sealed

cases = json.loads(sys.argv[1])
file = sys.argv[2]
clean, path, known = dict(os.environ), [*sys.path], {*sys.modules}
own = {name: getattr(identity, name) for name in ("cpu_name", "versions")}


def previewed(case):
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        status = main(["plan", "--json", "--model", case["model"], *case["words"]])
    plan = json.loads(out.getvalue())["plan"]
    assert status == bool(plan["ends"])
    return plan["lock"]["differs"]


def begun(case):
    # As a worker that was spawned has it.
    arguments = EngineArgs(case["model"], enforce_eager=True, **case["options"])
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    config = pickle.loads(pickle.dumps(config))
    facts, _ = model_facts(config)
    of_lock = facts_of_lock(facts, config, torch.device("cpu"))
    return Start(facts, 0, torch.device("cpu"), facts_of_lock=of_lock)


def started(case):
    try:
        verified_plan(begun(case), alone=True)
    except LockError as error:
        return list(error.differences)
    return []


def draft(**contents):
    with open(file, "w") as to:
        json.dump(sealed({"facts": {}, "result": {}, "seed": None, "tries": {}, **contents}), to)


found = []
for number, case in enumerate(cases):
    os.environ.clear()
    os.environ.update(clean | {"VLLM_FL_LOCK": file} | case["variables"])
    sys.path[:] = [*case["path"], *path]
    importlib.invalidate_caches()
    digest._code_of.cache_clear()  # what lies in a folder is another's for each case
    for name in [name for name in sys.modules if name.startswith("locked_")]:
        del sys.modules[name]
    for name, value in case["machine"].items():
        was = own[name]() if name == "versions" else value
        setattr(identity, name, lambda got={**was, **value} if name == "versions" else value: got)
    told = []
    if not number:
        reset_default_manager()
        draft()
        start = begun(case)
        plan, _ = verified_plan(start, alone=True)
        result = {"ops": labels(plan), "digest": "", "out": {}}
        draft(facts=start.facts_of_lock, result=result)
    for ask in (previewed, started):
        reset_default_manager()
        told.append(ask(case))
    found.append(told)
    for name, value in own.items():
        setattr(identity, name, value)
print(json.dumps({"found": found}))
"""

KERNEL = """
from vllm_fl import BackendImplKind, OpImpl, hookimpl

def silu_and_mul(x):
    return None

@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "vendor.NAME", BackendImplKind.VENDOR, silu_and_mul, "NAME")]
"""

Models = Callable[[str], Path]


def distribution(site: Path, name: str, version: str = "1.0", more: str = "") -> Path:
    """A folder in which an installed backend lies."""
    folder = site / f"locked_{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: locked-{name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata)
    entry = f"[vllm_fl.plugin]\nlocked-{name} = locked_{name}\n"
    (folder / "entry_points.txt").write_text(entry)
    (folder / "top_level.txt").write_text(f"locked_{name}\n")
    (site / f"locked_{name}.py").write_text(KERNEL.replace("NAME", name) + more)
    return site


def changed(folder: Path, to: Path, **values: Any) -> str:
    """Another folder of the same model, with other values in its configuration."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | values
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


@pytest.fixture(scope="module")
def cases(
    model: Models, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], str]]:
    """Name -> (how an engine differs from the first one, what its one line begins with)."""
    folder, qwen = tmp_path_factory.mktemp("lock"), model("qwen3")
    home = distribution(folder / "home", "acme")
    table = measured(str(qwen), "silu_and_mul")
    tables = [folder / "a.json", folder / "b.json"]
    for path, seconds in zip(tables, (1.0, 2.0), strict=True):
        path.write_text(dataclasses.replace(table, seconds=seconds).text)
    with_table = {"VLLM_FL_TABLE": str(tables[0]), "VLLM_FL_TABLE_UNACCEPTED": "1"}
    plain: dict[str, Any] = {"model": str(qwen), "path": [str(home)], "variables": with_table}
    two = distribution(distribution(folder / "two", "acme"), "zeta")
    moved_table = folder / "elsewhere.json"
    shutil.copy(tables[0], moved_table)
    return {
        "as locked": ({}, ""),
        "moved": (
            {
                "model": changed(qwen, folder / "moved"),
                "path": [str(distribution(folder / "venv", "acme"))],
                "variables": {**with_table, "VLLM_FL_TABLE": str(moved_table)},
            },
            "",
        ),
        "file": ({"path": [str(distribution(folder / "f", "acme", more="\n#"))]}, "locked-acme is"),
        "version": (
            {"path": [str(distribution(folder / "v", "acme", "1.1"))]},
            "locked-acme is 1.1",
        ),
        "missing": ({"path": []}, "locked-acme is nothing"),
        "extra": ({"path": [str(two)]}, "locked-zeta is 1.0"),
        "device": ({"machine": {"cpu_name": "Acme 9000"}}, "device is Acme 9000"),
        "torch": ({"machine": {"versions": {"torch": "9.9"}}}, "torch is 9.9"),
        "table": ({"variables": {**with_table, "VLLM_FL_TABLE": str(tables[1])}}, "table is"),
        "setting": (
            {"variables": {**with_table, "VLLM_FL_PREFER": "reference"}},
            "setting prefer is reference (environment VLLM_FL_PREFER); the lock has nothing",
        ),
        "log level": ({"variables": {**with_table, "VLLM_FL_LOG_LEVEL": "DEBUG"}}, ""),
        "vLLM's log level": ({"variables": {**with_table, "VLLM_LOGGING_LEVEL": "INFO"}}, ""),
        "model": (
            {"model": changed(qwen, folder / "other", rms_norm_eps=1e-3)},
            "model configuration: rms_norm_eps is 0.001, not",
        ),
        "arguments": (
            {"words": ["--max-num-seqs", "3"], "options": {"max_num_seqs": 3}},
            "engine arguments: ",  # vLLM makes others of it
        ),
        "port": ({"words": ["--port=8001", "--served-model-name=m", "--shutdown-timeout=60"]}, ""),
    } | {"(first)": (plain, "")}


@pytest.mark.slow
def test_each_difference_is_one_line_of_preview_and_start(
    cases: dict[str, tuple[dict[str, Any], str]], tmp_path: Path
) -> None:
    plain, _ = cases["(first)"]
    empty: dict[str, Any] = {"words": [], "options": {}, "machine": {}}
    names = [name for name in cases if name != "(first)"]
    asked = [{**empty, **plain, **cases[name][0]} for name in names]
    for case in asked:
        case["words"] = ["--enforce-eager", *case["words"]]
    secret = "hf_" + "a" * 30
    answered, _ = answer_of(
        BOTH,
        json.dumps(asked),
        str(tmp_path / "vllm-fl.lock"),
        VLLM_FL_PREFLIGHT="off",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_TOKEN=secret,
    )
    for name, (preview, start) in zip(names, answered["found"], strict=True):
        begins = cases[name][1]
        assert preview == start and len(start) == bool(begins), (name, preview, start)
        assert all(line.startswith(begins) for line in start), (name, start)
    assert secret not in (tmp_path / "vllm-fl.lock").read_text()


@pytest.mark.slow
def test_an_engine_that_is_locked_starts_again_and_another_one_ends(
    model: Models, tmp_path: Path
) -> None:
    file, folder = tmp_path / "vllm-fl.lock", str(model("qwen3"))
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    words = ["--enforce-eager", "--skip-tokenizer-init", "--max-logprobs=-1"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    command = [sys.executable, "-m", "vllm_fl.cli", "lock", "--model", folder, *words]
    env = {**os.environ, BIND: str(min(cores()))}  # as `run` has it
    done = subprocess.run(
        [*command, "--out", str(file)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lock = read_lock(str(file))
    assert lock.result["ops"]["rms_norm"] == "vendor.cpu"
    (first, *_) = lock.tries["rms_norm=vendor.cpu, bfloat16"]
    assert first["samples"] and 1 in first["counts"] and "further counts" in first
    job = Job(folder, batches()[:1], options=sizes, logits=False)
    named = {"VLLM_FL_LOCK": str(file)}
    kept = tmp_path / "chat.json"
    served = run(job, VLLM_FL_REPORT=str(kept), **named)
    told = json.loads(kept.read_text())
    assert f"seed {lock.seed}" in told["report"]["remarks"] and told["lock"] == []
    assert "[FL505]" not in served["log"]
    with pytest.raises(EngineFailed) as ended:
        run(job, VLLM_FL_PREFER="reference", **named)
    line = "setting prefer is reference (environment VLLM_FL_PREFER); the lock has nothing"
    assert "LockError" in ended.value.log and line in ended.value.log
    report = tmp_path / "report.json"
    named |= {"VLLM_FL_LOCK_MODE": "warn", "VLLM_FL_REPORT": str(report)}
    warned = run(job, VLLM_FL_PREFER="reference", **named)
    assert any(line in told for told in json.loads(report.read_text())["lock"])
    assert warned["log"].count(line) == 1 and "[FL505]" in warned["log"]
    assert [len(ids) for ids in warned["tokens"]] == [8] * len(job.batches[0])
