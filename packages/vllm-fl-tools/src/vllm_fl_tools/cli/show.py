"""`vllm-fl show`: the report that an engine has left, for people."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_fl.engine.state_file import EVERY
from vllm_fl.settings.schema import Settings

from ._show import UsageError, answer, print_table, say

SCHEMA = 1
"""What this release reads."""

STATES = {
    "starting": "its start was under way",
    "serving": "it served then",
    "ended": "it was shut down",
    "failed": "its start failed",
}

SILENT = 3 * EVERY
"""Seconds without a new state after which a process that ran is taken for gone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which reports."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help=f"what {Settings.report.variable} names; other ranks' lie beside it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit 0; 2 where a file is no report."""
    reports = [_read(Path(name)) for name in arguments.files]
    answer({"reports": reports}, _show, as_json=arguments.json)
    return 0


def _read(path: Path) -> dict[str, Any]:
    """What a file tells, with `silent`, the seconds since, where its process seems to be gone.

    Raises:
        UsageError: it cannot be read, or is no report of this release's.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        schema, report = told["schema"], told["report"]
        written = datetime.fromisoformat(told["written"])
        if not all(isinstance(report[key], dict) for key in ("ops", "demotions", "rejections")):
            raise TypeError("its plan is none")
        age = (datetime.now(UTC) - written).total_seconds()
    except OSError as error:
        raise UsageError(f"{path}: it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: it is no report of an engine; those lie where {Settings.report.variable} says"
        ) from error
    if schema != SCHEMA:
        raise UsageError(f"{path}: it is of schema {schema}; this vllm-fl reads {SCHEMA}")
    is_over = told.get("state") in ("ended", "failed") or age <= SILENT
    return {"file": str(path), **told, "silent": None if is_over else round(age)}


def _show(facts: Mapping[str, Any]) -> None:
    for number, told in enumerate(facts["reports"]):
        if number:
            say()
        _show_one(told)


def _show_one(told: Mapping[str, Any]) -> None:
    report, state = told["report"], str(told.get("state"))
    say(
        f"{told.get('model')}, rank {told.get('rank')} of replica {told.get('replica')}: "
        f"{report.get('mode')}, digest {report.get('digest')}"
    )
    say(
        f"Process {told.get('pid')} on {told.get('host')}, started {told.get('started')}, "
        f"written {told['written']}: {STATES.get(state, state)}."
    )
    if told["silent"] is not None:
        say(
            f"It has not written for {told['silent']} s, though it does every {EVERY:.0f} s: it "
            "was killed, as on SIGTERM by vLLM without --shutdown-timeout, or the file can no "
            "longer be written. What came after that is not in it."
        )
    error = told.get("error")
    if error:
        say(f"{error['time']}: {error['method']} raised {error['why']}")
    for failure in told.get("failures") or ():
        say(f"Implementation '{failure['impl']}' of op '{failure['op']}' raised {failure['why']}")
    tables = [report.get(name) or {} for name in ("calls", "refusals", "fallbacks")]
    rows = []
    for op, entry in report["ops"].items():
        counts = [sum(table.get(op, {}).values()) or None for table in tables]
        rows.append((op, entry.get("impl"), entry.get("reason"), *counts))
    print_table(["op", "implementation", "reason", "calls", "refusals", "fallbacks"], rows)
    out = [
        (op, impl, what, why)
        for key, what in (
            ("demotions", "failed at start"),
            ("rejections", "refuses all calls"),
            ("wrong", "wrong, and serves"),
        )
        for op, table in (report.get(key) or {}).items()
        for impl, why in table.items()
    ]
    if out:
        say("Taken out, or found wrong:")
        print_table(["op", "implementation", "what", "why"], out)
    for title, lines in (
        ("Differs from its lock", told.get("lock")),
        ("Settings", told.get("settings")),
        ("Not reached", _not_reached(report)),
    ):
        for line in lines or ():
            say(f"{title}: {line}")
    took = report.get("start") or {}
    if took:
        say("Its start, in seconds: " + ", ".join(f"{what} {s:.1f}" for what, s in took.items()))
    versions = {**(told.get("versions") or {}), **(told.get("plugins") or {})}
    say(", ".join(f"{name} {version}" for name, version in versions.items()))


def _not_reached(report: Mapping[str, Any]) -> list[str]:
    return [f"{op}: {why}" for op, why in (report.get("not_reached") or {}).items()]
