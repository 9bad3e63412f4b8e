"""`vllm-fl show`: print JSON files of engines and of this command, or write one HTML page.

It does not run an engine or need a device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_fl.settings.lock import MARK, read_lock
from vllm_fl.settings.schema import Settings
from vllm_fl.settings.values import read_text
from vllm_fl.text import quote

from ..engine.tuned import Tuned
from ..operate.state_file import EVERY
from ._options import draft_of
from ._show import SCHEMA, UsageError, answer, print_table, say

MAX_BYTES = 16 * 2**20

CONTENTS = {
    "report": "worker",
    "coverage": "coverage",
    "results": "verification",
    "culprits": "bisection",
    "table": "table",
    "plan": "plan",
    MARK: "lock",
}
"""Key of a file's object -> the kind of file."""

SHOWN = {"coverage": "_profile", "verification": "verify", "plan": "plan", "bisection": "bisect"}
"""Kind -> the module that prints it."""

MEASURED = ("table", "coverage", "verification")
"""The kinds that a page can have."""

STATES = {
    "starting": "its startup was under way",
    "serving": "it served then",
    "ended": "it was shut down",
    "failed": "its startup failed",
}

SILENT = 3 * EVERY
"""Maximum seconds between two states of a living process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help=f"a worker's report ({Settings.metrics.variable}), a lock, or the JSON that `plan`, "
        "`tune`, `verify`, `tune --profile` or `bisect` printed",
    )
    parser.add_argument(
        "--html", metavar="OUT", help="write one page of tables, verifications and profiles there"
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 0. Raises UsageError if a file's kind is unknown."""
    files = [_read(path) for path in arguments.files]
    if arguments.html is None:
        answer(
            {"files": [_as_json(each) for each in files]},
            lambda _: _show(files),
            as_json=arguments.json,
        )
        return 0
    from ._page import Measured, page

    for each in files:
        if each["kind"] not in MEASURED:
            raise UsageError(f"--html: {each['file']} is a {each['kind']}; there is no page of it")
    with draft_of(arguments.html, "--html") as out:
        text = page([Measured(Path(f["file"]).name, f["kind"], f["content"]) for f in files])
        out.put(text.encode(), lasting=True)
    facts = {
        "files": [{"name": Path(f["file"]).name, "kind": f["kind"]} for f in files],
        "html": str(out.path),
        "bytes": len(text.encode()),
    }
    answer(facts, _show_page, as_json=arguments.json)
    return 0


def _read(path: str) -> dict[str, Any]:
    """Return a file's `kind` and `content`; for a worker also `silent`, the result of `_silent`.

    Raises:
        SettingsError: the file cannot be read.
        UsageError: its kind is unknown, or it is incomplete.
    """
    text = read_text(path, "show", path, most=MAX_BYTES)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not complete JSON: {error}") from error
    keys = data if isinstance(data, dict) else {}
    kind = next((kind for key, kind in CONTENTS.items() if key in keys), None)
    if kind is None:
        raise UsageError(f"{path}: is no file of vllm-fl; it has none of {', '.join(CONTENTS)}")
    if kind == "lock":
        return {"file": path, "kind": kind, "content": read_lock(path, key="show")}
    if data.get("schema") != SCHEMA:
        raise UsageError(
            f"{path}: has schema {data.get('schema')!r:.60}; this release reads {SCHEMA}"
        )
    content = data["coverage"] if kind == "coverage" else data
    if kind == "table":
        try:
            content = Tuned.of(data["table"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: is not complete: {quote(error)}") from error
    found = {"file": path, "kind": kind, "content": content}
    return {**found, "silent": _silent(path, data)} if kind == "worker" else found


def _as_json(file: Mapping[str, Any]) -> dict[str, Any]:
    content = file["content"]
    return {**file, "content": content if isinstance(content, dict) else asdict(content)}


def _silent(path: str, data: Mapping[str, Any]) -> int | None:
    """Return the seconds since the last state of a worker that seems to be gone, or None."""
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(data["written"])).total_seconds()
        if not all(isinstance(data["report"][key], dict) for key in ("ops", "demotions")):
            raise TypeError("it has no plan")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: is not the report of a worker: {quote(error)}") from error
    is_over = data.get("state") in ("ended", "failed") or age <= SILENT
    return None if is_over else round(age)


def _show(files: list[dict[str, Any]]) -> None:
    for number, each in enumerate(files):
        if number:
            say()
        kind, content = each["kind"], each["content"]
        try:
            if kind == "worker":
                _show_worker(content, each["silent"])
            elif kind == "table":
                import_module(".tune", __package__).show(each["file"], content)
            elif kind == "lock":
                import_module(".plan", __package__).show_lock(content)
            else:
                facts = {"coverage": content} if kind == "coverage" else content
                import_module(f".{SHOWN[kind]}", __package__).show(facts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{each['file']}: is not complete: {quote(error)}") from error


def _show_page(facts: Mapping[str, Any]) -> None:
    say(f"{facts['html']}: {facts['bytes'] / 1e6:.2f} MB of {len(facts['files'])} files")


def _show_worker(told: Mapping[str, Any], silent: int | None) -> None:
    report, state = told["report"], str(told.get("state"))
    say(
        f"{told.get('model')}, rank {told.get('rank')} of replica {told.get('replica')}: "
        f"{report.get('mode')}, digest {report.get('digest')}"
    )
    say(
        f"Process {told.get('pid')} on {told.get('host')}, started {told.get('started')}, "
        f"written {told['written']}: {STATES.get(state, state)}."
    )
    if silent is not None:
        say(
            f"It has not written for {silent} s, though it does every {EVERY:.0f} s: it was "
            "killed, as vLLM without --shutdown-timeout is by SIGTERM, or the file cannot be "
            "written any more. Later events are not in it."
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
    disabled = [
        (op, impl, what, why)
        for key, what in (
            ("demotions", "failed at startup"),
            ("rejections", "refuses all calls"),
            ("wrong", "incorrect, and serves"),
        )
        for op, table in (report.get(key) or {}).items()
        for impl, why in table.items()
    ]
    if disabled:
        say("Disabled, or found to be incorrect:")
        print_table(["op", "implementation", "what", "why"], disabled)
    not_covered = (report.get("not_reached") or {}).items()
    for title, lines in (
        ("Differs from its lock", told.get("lock")),
        ("Settings", told.get("settings")),
        ("Not covered", [f"{op}: {why}" for op, why in not_covered]),
    ):
        for line in lines or ():
            say(f"{title}: {line}")
    took = report.get("start") or {}
    if took:
        say("Its startup, in seconds: " + ", ".join(f"{what} {s:.1f}" for what, s in took.items()))
    versions = {**(told.get("versions") or {}), **(told.get("plugins") or {})}
    say(", ".join(f"{name} {version}" for name, version in versions.items()))
