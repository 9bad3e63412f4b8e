"""Several ranks: one plan, stock's logits; an incorrect last rank disables an op on all ranks.

On GPUs over NCCL: Qwen3-8B's shapes, tensor parallel; Qwen3-30B-A3B's shapes, expert parallel, and
as data parallel engines with all ranks between them. On the CPU, as a rehearsal: tiny models over
gloo, with experts split over the ranks instead of spread; data parallel engines over FlagCX's
stand-in, compared with stock in tensor parallel. Measurements: $OUT/ranks.json.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from cases_engines import VARIANTS, batches
from engine_run import STOCK, EngineFailed, Job, largest_difference
from hosts import Host, Kept

from vllm_fl.plugins.registry import known_contracts

__all__ = ["cases"]

OP = "silu_and_mul"

LENGTHS = (5, 33, 100)
"""Prompt lengths in tokens."""

BEHIND = "reference.torch"
"""The fallback if the kernel of tests/engine/plugins/rank_one.py is disabled."""

CLOSE = 0.05
"""Allowed difference relative to the largest logit: bfloat16 rounds each layer to 8 bits."""

PLANS = {True: ("reference", "shipped"), False: ("shipped", "flagos")}
"""On the CPU or not -> the names of VARIANTS to try; two GPUs try all."""

TOKENS = 16
"""Maximum tokens of the table's first row."""

Result = dict[str, Any]
Judge = Callable[[list[Result], list[Result]], str]
"""(answers of stock's replicas, of the engine's replicas) -> the problem or ""."""

Runs = Future[list[Result]]
"""Answers of each replica of an engine."""

Judged = tuple[str, dict[str, Any]]
"""(the problem or "", further facts)."""

Case = tuple[str, Callable[[], Runs], Callable[[], Runs], Callable[[Runs, Runs], Judged]]
"""(name, starts stock, starts the engine, judges both)."""


def cases(folder: Path, host: Host) -> Iterator[tuple[str, str]]:
    """(plan, mode and model, the problem or "")."""
    if why := host.lacks():
        print(f"skipped: several ranks need {why}")
        return
    kept = Kept("ranks.json")
    with host.side_by_side() as pool:
        started = [
            (case, partial(judged, stock(), mine()))
            for case, stock, mine, judged in chain(
                _dense(folder, host, pool), _experts(folder, host, pool)
            )
            if host.only in case
        ]
        for case, judged in started:
            problem, facts = judged()
            kept.add(case, problem=problem, **facts)
            yield case, problem


def _names(host: Host) -> list[str]:
    """The names of VARIANTS to try."""
    every = host.ranks == 2 and not host.on_cpu
    return [name for name in VARIANTS if every or name in PLANS[host.on_cpu]]


def _dense(folder: Path, host: Host, pool: ThreadPoolExecutor) -> Iterator[Case]:
    model = cache(partial(host.model, folder, "qwen3"))
    table = cache(lambda: pool.submit(_table, host, model(), folder))

    def one(mode: str, variables: dict[str, str], *lengths: int) -> Runs:
        job = host.job(model(), batches(*lengths), mode == "eager")
        return pool.submit(_replicas, host, job, variables)

    def with_table(mode: str) -> Runs:
        job = host.job(model(), batches(*LENGTHS), mode == "eager")
        return pool.submit(_with_table, host, job, table())

    for mode in ("compiled", "eager"):
        label = f"TP {host.ranks}, dense, {mode}"
        stock = cache(partial(one, mode, STOCK, *LENGTHS))
        # Only one compiled case on the CPU, because compiling is slow there.
        once = host.on_cpu and mode == "compiled"
        for name in _names(host)[-1:] if once else _names(host):
            variables, planned = VARIANTS[name]
            mine = partial(one, mode, host.variables(**variables), *LENGTHS)
            yield f"{label}, {name}", stock, mine, partial(_judged, judge=_of_plan(planned))
        if once:
            continue
        mine = partial(with_table, mode)
        yield f"{label}, a table", stock, mine, partial(_judged, judge=_of_table)
        mine = partial(one, mode, _on_last(host.variables, "wrong"), *LENGTHS)
        yield f"{label}, wrong on the last rank", stock, mine, partial(_judged, judge=_of_wrong)
    mine = partial(one, "eager", _on_last(host.variables, "dies"), 5)
    yield f"{label}, the last rank dies while it verifies", Future, mine, partial(_dead, host)


def _experts(folder: Path, host: Host, pool: ThreadPoolExecutor) -> Iterator[Case]:
    """A mixture of experts: spread over the ranks, and with two engines between all ranks."""
    model = cache(partial(host.model, folder, "qwen3_moe"))
    spread = {} if host.on_cpu else {"enable_expert_parallel": True}
    half = host.ranks // 2

    def one(mode: str, variables: dict[str, str]) -> Runs:
        job = host.job(model(), batches(*LENGTHS), mode == "eager", **spread)
        return pool.submit(_replicas, host, job, variables)

    def two(mode: str, variables: dict[str, str]) -> Runs:
        size = {**spread, "tensor_parallel_size": half}
        job = host.job(model(), batches(*LENGTHS), mode == "eager", **size)
        return pool.submit(_replicas, host, job, variables, 2)

    forms = [(f"TP {host.ranks}", one)]
    if host.ranks >= 4:
        forms.append((f"DP 2 x TP {half}", two))
    for form, start in forms:
        for mode in ("eager",) if host.on_cpu else ("compiled", "eager"):
            label = f"{form}, {'experts' if host.on_cpu else 'EP'}, {mode}"
            stock = cache(partial(start, mode, STOCK))
            names = _names(host)
            # vLLM's CPU build has expert kernels only on its platform, and no gather for data
            # parallel.
            variables = partial(host.variables, device="")
            if host.on_cpu and start is two:
                stock = cache(partial(one, mode, STOCK))
                names = names[-1:]
                variables = partial(host.flagcx(folder / "between"), device="")
            for name in names:
                chosen, planned = VARIANTS[name]
                mine = partial(start, mode, variables(**chosen))
                judge = _of_plan(planned, mostly=True)
                yield f"{label}, {name}", stock, mine, partial(_judged, judge=judge)
            if start is two and mode == ("eager" if host.on_cpu else "compiled"):
                mine = partial(start, mode, _on_last(variables, "wrong"))
                judged = partial(_judged, judge=_of_wrong)
                yield f"{label}, wrong on the last rank", stock, mine, judged


def _on_last(variables: Callable[..., dict[str, str]], how: str) -> dict[str, str]:
    """Variables of an engine with a kernel that is wrong, or dies, on the last rank. All other ops
    are stock: vLLM gives the other ranks some seconds to end after one dies."""
    others = ";".join(f"{op}=stock" for op in known_contracts().contracts if op != OP)
    order = f"{others};{OP}=vendor:rankone|reference"
    return variables("rank_one", RANK_ONE=how, VLLM_FL_PER_OP=order)


def _judged(stock: Runs, runs: Runs, judge: Judge) -> Judged:
    """(the problem compared with stock or "", facts)."""
    mine: list[Result] = []
    try:
        mine = runs.result()
        facts = _facts(mine)
        theirs = stock.result()
        theirs *= len(mine) // len(theirs)
        off = [largest_difference(*pair) for pair in zip(theirs, mine, strict=True)]
        facts |= {"largest difference of logits, and largest logit": off}
        return _disagrees(mine) or judge(theirs, mine), facts
    except EngineFailed as error:
        engine = "stock" if mine else "the engine"
        return f"{engine} failed: {error.log[-6000:]}", {"log": error.log}
    except Exception as error:
        return f"{type(error).__name__}: {error}", {}


def _facts(mine: list[Result]) -> dict[str, Any]:
    """Facts of an engine other than tokens and logits."""
    first = mine[0]["report"][0]
    return {
        "seconds": [round(each["took"], 1) for each in mine],
        "lines": [line for line in mine[0]["log"].splitlines() if "vllm-fl" in line][:30],
        "plan": {op: each["impl"] for op, each in first["ops"].items()},
        "demotions": first["demotions"],
        "remarks": first["remarks"],
        "start": first["start"],
    }


def _disagrees(mine: list[Result]) -> str:
    """Empty if all ranks have the same digest."""
    digests = [[report["digest"] for report in each["report"]] for each in mine]
    return "" if len({d for each in digests for d in each}) == 1 else f"the digests are {digests}"


def _close(stock: list[Result], mine: list[Result], mostly: bool = False) -> str:
    """Empty if all logits equal stock's logits; `mostly` compares most tokens, since a token with
    two nearly equal scores may use another expert."""
    for number, pair in enumerate(zip(stock, mine, strict=True)):
        off, magnitude = largest_difference(*pair)
        if mostly:
            off = median(_by_token(*pair))
        if not off <= CLOSE * magnitude:
            most = "of most tokens " if mostly else ""
            return f"replica {number}: logits {most}differ by {off:.3g} of {magnitude:.3g}"
    return ""


def _by_token(stock: Result, mine: Result) -> list[float]:
    """Difference of the logits of each prompt token and of the first generated one."""
    found = []
    for prompt, other, tokens in zip(stock["logits"], mine["logits"], stock["tokens"], strict=True):
        count = len(prompt) - len(tokens) + 1
        for row, twin in zip(prompt[:count], other[:count], strict=True):
            found.append(max(abs(a - b) for a, b in zip(row, twin, strict=True)))
    return found


def _of_plan(planned: str | None, mostly: bool = False) -> Judge:
    """Judge of an engine: the op must be planned with this implementation, unless None."""

    def judge(stock: list[Result], mine: list[Result]) -> str:
        report = mine[0]["report"][0]
        impl = report["ops"][OP]["impl"]
        if planned and impl != planned:
            return f"{OP}={impl}, expected {planned}; {report['demotions']}"
        return _close(stock, mine, mostly)

    return judge


def _of_wrong(stock: list[Result], mine: list[Result]) -> str:
    """Judge of an incorrect last rank: disabled on all ranks, with the rank in the cause."""
    reports = [report for each in mine for report in each["report"]]
    last = len(reports) - 1
    for report in reports:
        why = report["demotions"].get(OP, {}).get("vendor.rankone", "")
        if f"on rank {last}" not in why or report["ops"][OP]["impl"] != BEHIND:
            return f"rank {report['rank']}: {report['ops'][OP]}, {report['demotions']}"
    if not any(f"on rank {last}; disabled on all ranks" in each["log"] for each in mine):
        return f"no line of the log says that it is off on all, and that rank {last} is why"
    return _close(stock, mine, mostly=len(mine) > 1)


def _of_table(stock: list[Result], mine: list[Result]) -> str:
    """Judge of an engine with a table: it applies on all ranks, and its row is in the plan."""
    for report in mine[0]["report"]:
        table = report["table"] or {}
        if not table.get("acts"):
            return f"rank {report['rank']}: {table}"
        rows = report["ops"][OP].get("rows", [])
        if not any(row["up_to"] == TOKENS for row in rows):
            return f"rank {report['rank']}: {report['ops'][OP]}"
    return _close(stock, mine)


def _table(host: Host, model: str, folder: Path) -> Path:
    """The file of `vllm-fl tune` for an engine of all ranks, with other rows than the winners:
    calls of up to TOKENS tokens use another implementation than larger ones."""
    out = folder / "tuned.yaml"
    job = host.job(model, [], eager=True)
    size = {k: v for k, v in job.options.items() if k in ("tensor_parallel_size", "max_model_len")}
    further = [word for k, v in size.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    dtype = ["--dtype", job.options["dtype"]] if "dtype" in job.options else []
    command = ["tune", "--model", model, "--op", OP, "--enforce-eager", "--out", str(out)]
    command += ["--tokens", f"{TOKENS},256", *dtype, "--skip-tokenizer-init", *further]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_fl_tools.cli", *command],
        env={**os.environ, **host.bound, **host.variables()},
        capture_output=True,
        text=True,
        timeout=host.limit,
        check=False,
    )
    if not out.exists():
        raise RuntimeError(
            f"vllm-fl {' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
        )
    table = yaml.safe_load(out.read_text())
    impl = "impl:reference.torch" if host.on_cpu else "impl:default.flagos"
    measured = {"date": "2026-11-29", "device": "this", "ratio": 1.0, "what": "a test"}
    order = {f"<={TOKENS}": impl, "rest": "stock"}
    ops = {OP: {"eager": order, "compiled": order, "measured": measured}}
    table["devices"] = [{"name": "*", "op_backends": ops}]
    out.write_text(yaml.safe_dump(table))
    return out


def _with_table(host: Host, job: Job, table: Future[Path]) -> list[Result]:
    return [host.run(job, **host.variables(VLLM_FL_TABLE=str(table.result())))]


def _dead(host: Host, stock: Runs, runs: Runs) -> Judged:
    """(the problem or "", log lines) of a startup with a dying last rank."""
    del stock  # there is nothing to compare
    try:
        runs.result()
    except EngineFailed as error:
        log = error.log
    else:
        return "the engine started", {}
    words = ("is gone", " died", "initialization failed", "onitored", "after ")
    lines = [line for line in log.splitlines() if any(word in line for word in words)]
    if "did not return within" in log:
        return f"it hangs: {log[-3000:]}", {"log": log}
    last = host.ranks - 1
    ends = re.compile(rf"rank {last} \(process \d+ on \S+\) died\.|is gone \(rank {last}\)")
    named = any(map(ends.search, lines))
    return "" if named else f"rank {last} is not named: {lines}", {"lines": lines}


def _replicas(host: Host, job: Job, variables: dict[str, str], count: int = 1) -> list[Result]:
    """Answers of `count` data parallel engines of this job, each in its own process."""
    if count == 1:
        return [host.run(job, **variables)]
    addresses = {
        "VLLM_DP_SIZE": str(count),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(_free_ports(8)),
        **variables,
    }
    with tempfile.TemporaryDirectory() as meets, ThreadPoolExecutor() as pool:
        each = replace(job, meets=meets)
        runs = [
            pool.submit(host.run, each, VLLM_DP_RANK=str(n), VLLM_DP_RANK_LOCAL=str(n), **addresses)
            for n in range(count)
        ]
        return [run.result() for run in runs]


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, below the system's ephemeral ports."""
    while True:
        first = random.SystemRandom().randrange(20_000, 30_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as each:
                    each.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
