"""FlagCX's communicator on two GPUs, over NCCL: its collectives, captured in graphs, an engine.

The library is packages/vllm-fl-flagcx/tests/nccl.c, compiled here. Figures: $OUT/flagcx.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import OPTIONS, batches, side_by_side
from engine_run import STOCK, EngineFailed, Job, largest_difference, run

__all__ = ["cases"]

PACKAGE = Path(__file__).resolve().parents[2] / "packages" / "vllm-fl-flagcx"
RANKS_LIMIT, ENGINE_LIMIT = 100.0, 240.0
"""Seconds."""

STAMP = re.compile(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b")
"""The time in a line of vLLM's log."""


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(case, what is wrong or empty)."""
    import torch

    if torch.cuda.device_count() < 2:
        print("skipped: two ranks need two GPUs")
        return
    sys.path.insert(0, str(PACKAGE / "tests"))
    from flagcx_library import built_over_nccl

    flagcx = built_over_nccl(folder / "flagcx")
    sources = os.pathsep.join([str(PACKAGE / "src"), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": sources, "FLAGCX_PATH": str(flagcx)}
    if not entry_points(group="vllm_fl.plugin", name="flagcx"):
        variables["VLLM_FL_PLUGIN_MODULES"] = "vllm_fl_flagcx.plugin"
    figures: dict[str, Any] = {}
    with side_by_side() as pool:
        ranks = {
            part: pool.submit(on_two, part, folder / part, flagcx, variables)
            for part in ("collectives", "graphs")
        }
        options = {**OPTIONS, "tensor_parallel_size": 2}
        model = str(tiny_model.make(folder, "qwen3"))
        job = Job(model, batches(5, 33, 100), new_tokens=32, eager=False, options=options)
        stock_one = {**variables, "VLLM_FL_PER_OP": "communicator=stock"}
        engines = {
            name: pool.submit(run, job, timeout=ENGINE_LIMIT, **of_engine)
            for name, of_engine in (
                ("stock", STOCK),
                ("vLLM's communicator", stock_one),
                ("flagcx", variables),
            )
        }
        for part, told in ranks.items():
            for case, problem, seconds in told.result():
                figures.setdefault(part, {})[case] = {"problem": problem, "seconds": seconds}
                yield f"{part}: {case}", problem
            written(figures)
        found = {}
        for name, engine in engines.items():
            found[name], problem = outcome(engine)
            yield f"engine: {name} answers", problem
            if found[name] is not None:
                figures.setdefault("engines", {})[name] = facts(found[name])
                written(figures)
        mine = found["flagcx"]
        if mine is None:
            return
        yield "engine: FlagCX is planned and serves", serves(mine)
        for name in ("stock", "vLLM's communicator"):
            other = found[name]
            if other is not None:
                difference, magnitude = largest_difference(other, mine)
                figures["engines"]["flagcx"][f"logits against {name}"] = difference, magnitude
                written(figures)
                same = other["tokens"] == mine["tokens"]
                far = f"other tokens; logits differ by {difference:.3g} of {magnitude:.3g}"
                yield f"engine: the tokens of {name}", "" if same else far


def on_two(
    part: str, folder: Path, flagcx: Path, variables: dict[str, str]
) -> list[tuple[str, str, float]]:
    """(case, what is wrong on either rank or nothing, seconds) of a part of flagcx_rank.py."""
    folder.mkdir()
    script = str(Path(__file__).with_name("flagcx_rank.py"))
    logs = [folder / f"{rank}.log" for rank in range(2)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, script, str(rank), part, str(folder), str(flagcx)]
            started.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    begin = time.monotonic()
    while any(each.poll() is None for each in started) and time.monotonic() < begin + RANKS_LIMIT:
        time.sleep(0.1)
    ends = []
    for each in started:
        ends.append("did not end" if each.poll() is None else f"ended with {each.returncode}")
        if each.poll() is None:
            each.kill()
        each.wait()
    seconds = time.monotonic() - begin
    told = [lines(folder / f"{rank}.jsonl") for rank in range(2)]
    found = []
    for first, second in zip(*told, strict=False):
        wrong = [f"rank {n}: {e['problem']}" for n, e in enumerate((first, second)) if e["problem"]]
        found.append((first["case"], "; ".join(wrong), first["seconds"]))
    badly = [
        f"rank {n} {end} after {len(told[n])} cases: {logs[n].read_text(errors='replace')[-3000:]}"
        for n, end in enumerate(ends)
        if end != "ended with 0"
    ]
    return [*found, ("both ranks reach the end", "; ".join(badly), seconds)]


def lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outcome(engine: Future[dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """(what the engine gave, empty), or (None, why it gave nothing)."""
    try:
        return engine.result(), ""
    except EngineFailed as error:
        return None, f"the engine failed: {error.log[-6000:]}"
    except Exception:
        return None, traceback.format_exc()


def serves(result: dict[str, Any]) -> str:
    """Empty when start line, groups and digests are as they should be."""
    (line, *_) = [*of_log(result, " planned: "), ""]
    first, second = result["report"]
    if not line or first["ops"]["communicator"]["impl"] != "default.flagcx":
        return f"the plan does not have it: {line}"
    if first["digest"] != second["digest"]:
        return f"the digests differ: {first['digest']} and {second['digest']}"
    for report in (first, second):
        if report["groups"].get("tp:0") != "default.flagcx" or report["demotions"]:
            return f"rank {report['rank']}: {report['groups']}, {report['demotions']}"
    return ""


def facts(result: dict[str, Any]) -> dict[str, Any]:
    """What an engine said of its start."""
    planned, groups = of_log(result, " planned: "), of_log(result, "Groups of ranks")
    stamps = STAMP.findall(result["log"])
    to_plan = None
    if planned and stamps and (at := STAMP.search(planned[0])):
        first, then = (
            datetime.strptime(f"2000-{s}", "%Y-%m-%d %H:%M:%S") for s in (stamps[0], at[0])
        )
        to_plan = (then - first).total_seconds()
    return {
        "planned": planned,
        "groups": groups,
        "flagcx": of_log(result, "FlagCX "),
        "graphs": of_log(result, "Graph capturing finished"),
        "seconds from the first line to the plan": to_plan,
        "served": [report["groups"] for report in result["report"] or ()],
        "tokens": result["tokens"],
    }


def _time(stamp: str) -> datetime:
    return datetime.strptime(f"2000-{stamp}", "%Y-%m-%d %H:%M:%S")


def of_log(result: dict[str, Any], words: str) -> list[str]:
    return [line for line in result["log"].splitlines() if words in line]


def written(figures: dict[str, Any]) -> None:
    Path(os.environ.get("OUT", "."), "flagcx.json").write_text(json.dumps(figures, indent=1))
