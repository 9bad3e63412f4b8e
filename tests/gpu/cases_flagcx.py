"""FlagCX's communicator between the ranks of a host: its collectives, and an engine.

On GPUs over NCCL, also in captured graphs; on the CPU, as a rehearsal, over shared memory. Compiles
nccl.c or shared_memory.c of packages/vllm-fl-flagcx/tests. Measurements: $OUT/flagcx.json.
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
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import batches
from engine_run import STOCK, EngineFailed, largest_difference
from hosts import Host, Kept

__all__ = ["cases"]

RANKS_LIMIT = 100.0
"""Timeout in seconds of the ranks of a part."""

STAMP = re.compile(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b")
"""Time stamp of vLLM's log lines."""


def cases(folder: Path, host: Host) -> Iterator[tuple[str, str]]:
    """(case, the problem or "")."""
    if why := host.lacks():
        print(f"skipped: several ranks need {why}")
        return
    variables = host.flagcx(folder / "flagcx")()
    kept = Kept("flagcx.json")
    with host.side_by_side() as pool:
        ranks = {
            part: pool.submit(on_all, host, part, folder / part, variables)
            for part in ("collectives", "graphs")
            if host.only in part
        }
        job = host.job(
            str(tiny_model.make(folder, "qwen3")), batches(5, 33, 100), eager=host.on_cpu
        )
        job = replace(job, new_tokens=32)
        stock_one = {**variables, "VLLM_FL_PER_OP": "communicator=stock"}
        engines = {
            name: pool.submit(host.run, job, **of_engine)
            for name, of_engine in (
                ("stock", STOCK),
                ("vLLM's communicator", stock_one),
                ("flagcx", variables),
            )
            if host.only in "engine"
        }
        for part, results in ranks.items():
            for case, problem, seconds in results.result():
                kept.add(f"{part}: {case}", problem=problem, seconds=seconds)
                yield f"{part}: {case}", problem
        found = {}
        for name, engine in engines.items():
            found[name], problem = outcome(engine)
            yield f"engine: {name} answers", problem
            if found[name] is not None:
                kept.add(f"engine: {name}", **facts(found[name]))
        mine = found.get("flagcx")
        if mine is None:
            return
        yield "engine: FlagCX is planned and serves", serves(mine)
        for name in ("stock", "vLLM's communicator"):
            other = found[name]
            if other is not None:
                difference, magnitude = largest_difference(other, mine)
                kept.add("engine: flagcx", **{f"logits against {name}": (difference, magnitude)})
                same = other["tokens"] == mine["tokens"]
                far = f"other tokens; logits differ by {difference:.3g} of {magnitude:.3g}"
                yield f"engine: the tokens of {name}", "" if same else far


def on_all(
    host: Host, part: str, folder: Path, variables: dict[str, str]
) -> list[tuple[str, str, float]]:
    """(case, the problem on any rank or "", seconds) of a part of flagcx_rank.py."""
    folder.mkdir()
    script = str(Path(__file__).with_name("flagcx_rank.py"))
    logs = [folder / f"{rank}.log" for rank in range(host.ranks)]
    device = "cpu" if host.on_cpu else "cuda"
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            given = [str(host.ranks), part, str(folder), variables["FLAGCX_PATH"], device]
            started.append(
                subprocess.Popen(
                    [sys.executable, script, str(rank), *given],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    begin, limit = time.monotonic(), min(RANKS_LIMIT, host.limit)
    while any(each.poll() is None for each in started) and time.monotonic() < begin + limit:
        time.sleep(0.1)
    ends = []
    for each in started:
        ends.append("did not end" if each.poll() is None else f"ended with {each.returncode}")
        if each.poll() is None:
            each.kill()
        each.wait()
    seconds = time.monotonic() - begin
    done = [lines(folder / f"{rank}.jsonl") for rank in range(host.ranks)]
    found = []
    for each in zip(*done, strict=False):
        wrong = [f"rank {n}: {e['problem']}" for n, e in enumerate(each) if e["problem"]]
        found.append((each[0]["case"], "; ".join(wrong), each[0]["seconds"]))
    badly = [
        f"rank {n} {end} after {len(done[n])} cases: {logs[n].read_text(errors='replace')[-3000:]}"
        for n, end in enumerate(ends)
        if end != "ended with 0"
    ]
    return [*found, ("all ranks reach the end", "; ".join(badly), seconds)]


def lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file; empty if the file is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outcome(engine: Future[dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """(the engine's result, ""), or (None, the error)."""
    try:
        return engine.result(), ""
    except EngineFailed as error:
        return None, f"the engine failed: {error.log[-6000:]}"
    except Exception:
        return None, traceback.format_exc()


def serves(result: dict[str, Any]) -> str:
    """Empty if startup line, groups and digests are correct."""
    (line, *_) = [*of_log(result, " planned: "), ""]
    reports = result["report"]
    if not line or reports[0]["ops"]["communicator"]["impl"] != "default.flagcx":
        return f"the plan does not have it: {line}"
    if len(digests := {report["digest"] for report in reports}) > 1:
        return f"the digests differ: {digests}"
    for report in reports:
        if report["groups"].get("tp:0") != "default.flagcx" or report["demotions"]:
            return f"rank {report['rank']}: {report['groups']}, {report['demotions']}"
    return ""


def facts(result: dict[str, Any]) -> dict[str, Any]:
    """Facts from an engine's startup log."""
    planned, groups = of_log(result, " planned: "), of_log(result, "Rank groups")
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
        "seconds": result["took"],
    }


def of_log(result: dict[str, Any], words: str) -> list[str]:
    return [line for line in result["log"].splitlines() if words in line]
