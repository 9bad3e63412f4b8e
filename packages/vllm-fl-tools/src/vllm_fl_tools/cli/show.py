"""`vllm-fl show`: print worker reports and other results, or make an HTML page.

It does not run an engine or need a device.

Example: vllm-fl show chat.report.json
"""

from __future__ import annotations

import argparse
import io
import json
import socket
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_fl.settings.lock import MARK, Locked, read_lock
from vllm_fl.settings.schema import Settings
from vllm_fl.settings.values import read_text
from vllm_fl.text import quote

from ..engine.tuning_table import Tuned
from ..operate.state_file import CLOSE_TIMEOUT, INTERVAL, request
from ._options import draft_of
from ._show import INCOMPLETE, OUTPUT_SCHEMA, UsageError, answering, print_answer, print_table, say

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

STATES = {"starting": "starting up", "ended": "shut down", "failed": "failed at startup"}

UNCOUNTED = ("stock", "foreign")
"""Implementations without counted calls: vLLM's, and another plugin's for vLLM."""

SILENT = 3 * INTERVAL
"""Maximum seconds between two reports of a living process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help=f"a worker report ({Settings.metrics.variable}), a lock file, or the JSON output of "
        "`plan`, `tune`, `verify`, `tune --profile` or `bisect`",
    )
    parser.add_argument(
        "--html", metavar="OUT", help="write a page of tuning tables, verifications and profiles"
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 0. Raises UsageError if a file's kind is unknown."""
    files = [_current(path) for path in arguments.files]
    if arguments.html is None:
        shown = [_as_json(each) for each in files]  # also a check, before anything is printed
        print_answer({"files": shown}, lambda _: _show(files), as_json=arguments.json)
        return 0
    from ._page import KINDS, ResultFile, benchmark_report

    for each in files:
        if each["kind"] not in KINDS:
            raise UsageError(f"--html: {each['file']} is a {each['kind']}, which has no page")
    with draft_of(arguments.html, "--html") as out:
        text = benchmark_report(
            [ResultFile(Path(f["file"]).name, f["kind"], f["content"]) for f in files]
        )
        out.put(text.encode(), lasting=True)
    facts = {
        "files": [{"name": Path(f["file"]).name, "kind": f["kind"]} for f in files],
        "html": str(out.path),
        "bytes": len(text.encode()),
    }
    print_answer(facts, _show_page, as_json=arguments.json)
    return 0


def _current(path: str) -> dict[str, Any]:
    """Read a file like `_read`, after a running engine has written its current counts.

    A process of this host that wrote none is gone if its id does not exist.
    """
    found = _read(path)
    is_alive = found["kind"] == "worker" and found["silent"] is None
    if not is_alive or found["content"].get("state") != "serving":
        return found
    request({Path(path): lambda: [Path(path)]}, CLOSE_TIMEOUT)
    now = _read(path)
    content = now["content"]
    is_here = content == found["content"] and content.get("host") == socket.gethostname()
    if is_here and not Path(f"/proc/{content.get('pid')}").exists():
        now["silent"] = _age(content)
    return now


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
        raise UsageError(f"{path}: not complete JSON: {error}") from error
    keys = data if isinstance(data, dict) else {}
    kind = next((kind for key, kind in CONTENTS.items() if key in keys), None)
    if kind is None:
        raise UsageError(f"{path}: not a vllm-fl file; it has no key {', '.join(CONTENTS)}")
    if kind == "lock":
        return {"file": path, "kind": kind, "content": read_lock(path, key="show")}
    if data.get("schema") != OUTPUT_SCHEMA:
        raise UsageError(
            f"{path}: it has schema {data.get('schema')!r:.60}, but this "
            f"release reads {OUTPUT_SCHEMA}"
        )
    content = data["coverage"] if kind == "coverage" else data
    if kind == "table":
        try:
            content = Tuned.of(data["table"])
        except INCOMPLETE as error:
            raise UsageError(f"{path}: incomplete: {quote(error)}") from error
    found = {"file": path, "kind": kind, "content": content}
    return {**found, "silent": _silent(path, data)} if kind == "worker" else found


def _as_json(file: dict[str, Any]) -> dict[str, Any]:
    with answering(io.StringIO()):
        _show([file])  # raises an error if it is incomplete
    content = file["content"]
    return {**file, "content": asdict(content) if isinstance(content, Locked | Tuned) else content}


def _silent(path: str, data: Mapping[str, Any]) -> int | None:
    """Return the seconds since the last report of a worker that seems to be gone, or None."""
    try:
        age = _age(data)
        if not all(isinstance(data["report"][key], dict) for key in ("ops", "demotions")):
            raise TypeError("the plan is missing")
    except INCOMPLETE as error:
        raise UsageError(f"{path}: not a worker report: {quote(error)}") from error
    is_over = data.get("state") in ("ended", "failed") or age <= SILENT
    return None if is_over else age


def _age(data: Mapping[str, Any]) -> int:
    """Return the seconds since a worker wrote its report."""
    return round((datetime.now(UTC) - datetime.fromisoformat(data["written"])).total_seconds())


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
        except INCOMPLETE as error:
            raise UsageError(f"{each['file']}: incomplete: {quote(error)}") from error


def _show_page(facts: Mapping[str, Any]) -> None:
    say(f"{facts['html']}: {facts['bytes'] / 1e6:.2f} MB of {len(facts['files'])} files")


def _show_worker(content: Mapping[str, Any], silent: int | None) -> None:
    report, state = content["report"], str(content.get("state"))
    say(
        f"{content.get('model')}, rank {content.get('rank')} of replica {content.get('replica')}: "
        f"{report.get('mode')}, digest {report.get('digest')}"
    )
    say(
        f"Process {content.get('pid')} on {content.get('host')}, started {content.get('started')}: "
        f"{STATES.get(state, state)} at {content['written']}."
    )
    if silent is not None:
        say(
            f"The process is gone without a last report; its last update was {silent} s ago. It "
            "was killed, or got SIGTERM without --shutdown-timeout (or the file is unwritable). "
            "Later calls and errors are missing here."
        )
    if error := content.get("error"):
        say(f"{error['time']}: {error['method']} raised {error['why']}")
    for failure in content.get("failures") or ():
        say(f"Implementation '{failure['impl']}' of op '{failure['op']}' raised {failure['why']}")
    tables = [report.get(name) or {} for name in ("calls", "refusals", "fallbacks")]
    rows = []
    for op, entry in report["ops"].items():
        counts: list[Any] = [sum(table.get(op, {}).values()) for table in tables]
        if not counts[0] and (not tables[0] or entry.get("impl") in UNCOUNTED):
            counts[0] = ""
        rows.append((op, entry.get("impl"), entry.get("reason"), *counts))
    print_table(["op", "implementation", "reason", "calls", "refusals", "fallbacks"], rows)
    counted = "" if tables[0] else f", and others only with {Settings.count_calls.variable}=1"
    say(f"Calls of vLLM's implementation (stock) are not counted{counted}.")
    if kernels := report.get("kernels"):
        shown = [tuple(row[key] for key in ("op", "impl", "class", "layers")) for row in kernels]
        print_table(["op", "implementation", "class", "layers"], shown)
    disabled = [
        (op, impl, what, why)
        for key, what in (
            ("demotions", "failed at startup"),
            ("rejections", "supports no call"),
            ("wrong", "incorrect, still in use"),
        )
        for op, table in (report.get(key) or {}).items()
        for impl, why in table.items()
    ]
    if disabled:
        say("Disabled or incorrect implementations:")
        print_table(["op", "implementation", "what", "why"], disabled)
    unused = (report.get("not_reached") or {}).items()
    for title, lines in (
        ("Differs from the lock file", content.get("lock")),
        ("Setting", content.get("settings")),
        ("Unused by this model", [f"{op}: {why}" for op, why in unused]),
    ):
        for line in lines or ():
            say(f"{title}: {line}")
    if took := report.get("start"):
        say("Startup, in seconds: " + ", ".join(f"{what} {s:.1f}" for what, s in took.items()))
    versions = {**(content.get("versions") or {}), **(content.get("plugins") or {})}
    say(", ".join(f"{name} {version}" for name, version in versions.items()))
