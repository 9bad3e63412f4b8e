"""`vllm-fl verify --stock`: compare the layers of vLLM with exact results, without vllm-fl.

One engine starts as configured, with checks in its workers (`vllm_fl_verify.stock`).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_fl.settings.schema import Settings
from vllm_fl.text import clean

from ._engines import START_TIMEOUT, check_model, running_engine
from ._show import UsageError, print_answer, print_table, say

EXTENSION = "vllm_fl_verify.stock.worker"

TIMEOUT = 7200.0
"""Time limit in seconds of all comparisons after the startup."""

WITHOUT = {Settings.enabled.variable: "false", Settings.plugins.variable: "vllm-fl-ops"}
"""Variables of the engine: no overlay, and no plugin except the contracts."""

HEADINGS = ("layers of", "class", "compared with", "layers", "calls", "worst", "verdict")

SHOWN = 3
"""Maximum number of incorrect layers that are described per row."""

LEGEND = "worst: the largest error as a multiple of the tolerance; 1 is the limit."


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a result is incorrect, or nothing was compared."""
    more = arguments.more
    model = check_model("--stock", arguments.model, more)
    for option in ("op", "impl", "dtype", "device", "emulated"):
        if getattr(arguments, option) is not None:
            raise UsageError(f"--stock excludes --{option}: it runs the implementations of vLLM")
    checks = "ThoroughChecks" if arguments.thorough else "StockChecks"
    began = time.monotonic()
    with running_engine(
        "of stock vLLM",
        model,
        {"worker_extension_cls": f"{EXTENSION}.{checks}"},
        {**os.environ, **WITHOUT},
        steps_aside=True,
        arguments=more,
        limits=(START_TIMEOUT, TIMEOUT),
    ) as engine:
        started = time.monotonic()
        ranks = engine.ask("stock", reload=arguments.thorough)["ranks"]
        ended = time.monotonic()
    rows = _joined(rank["rows"] for rank in ranks)
    found = {
        "model": model,
        "arguments": more,
        "ranks": len(ranks),
        "rows": rows,
        "seconds": {
            "startup": round(started - began, 1),
            "while loading": round(max(rank["seconds"] for rank in ranks), 1),
            "afterwards": round(ended - started, 1),
        },
    }
    print_answer({"stock": found}, show, as_json=arguments.json)
    return 1 if any(row["incorrect"] for row in rows) or not _calls(rows) else 0


def _calls(rows: Iterable[Mapping[str, Any]]) -> int:
    return sum(row["calls"] for row in rows)


def _joined(ranks: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of all ranks, joined by layer type, class and comparison."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank, rows in enumerate(ranks):
        for row in rows:
            key = row["kind"], row["class"], row["against"]
            problems = [f"rank {rank}, {problem}" for problem in row["problems"]]
            known = found.setdefault(key, {**row, "calls": 0, "worst": 0.0, "problems": []})
            known["calls"] += row["calls"]
            for name in ("layers", "incorrect"):
                known[name] = max(known[name], row[name])
            both = known["worst"], row["worst"]
            known["worst"] = None if None in both else max(both)
            known["problems"] = [*known["problems"], *problems]
            known["skipped"] = {**row["skipped"], **known["skipped"]}
    return [*found.values()]


def _verdict(row: Mapping[str, Any]) -> str:
    if row["incorrect"]:
        return "INCORRECT"
    return "correct" if row["calls"] else "not compared"


def show(facts: Mapping[str, Any]) -> None:
    found = facts["stock"]
    rows, seconds = found["rows"], found["seconds"]
    print_table(HEADINGS, map(_line, rows))
    say(LEGEND)
    for row in rows:
        for problem in row["problems"][:SHOWN]:
            say(f"{row['class']}: incorrect: {clean(problem)}")
        if more := len(row["problems"][SHOWN:]):
            say(f"{row['class']}: incorrect: {more} more layers or ranks; --json has them all")
        for why, layers in row["skipped"].items():
            say(f"{row['kind']} {row['class']}: {layers} not compared: {clean(why)}")
    wrong = sum(bool(row["incorrect"]) for row in rows)
    verdict = f"{wrong} of {len(rows)} rows are incorrect" if wrong else "No incorrect result"
    took = seconds["while loading"] + seconds["afterwards"]
    say(
        f"{verdict}: {_calls(rows)} calls compared in {took:.1f} s, in addition to a startup of "
        f"{seconds['startup'] - seconds['while loading']:.1f} s."
    )


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    worst = math.inf if row["worst"] is None else row["worst"]
    return (
        row["kind"],
        row["class"],
        row["against"],
        str(row["layers"]),
        str(row["calls"]),
        f"{worst:.3g}" if row["calls"] else "-",
        _verdict(row),
    )
