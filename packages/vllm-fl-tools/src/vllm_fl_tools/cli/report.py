"""`vllm-fl report`: one page of the JSON that `tune`, `verify` and `coverage` print.

It runs nothing, so that it works on a machine without the device too.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_fl.settings.values import read_text
from vllm_fl.text import quote

from ..engine.tuned import Tuned
from ._options import ReportFile
from ._page import Measured, page
from ._show import SCHEMA, UsageError, answer, say

MAX_BYTES = 16 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is read, and where the page goes."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="what `tune --json`, `verify --json` or `coverage --json` printed",
    )
    parser.add_argument("--html", metavar="OUT", required=True, help="write the page there")


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 when the page was written."""
    measured = _read(arguments.files)
    with ReportFile(arguments.html, "--html") as out:
        text = page(measured)
        out.write(text)
    told = {
        "files": [{"name": m.name, "kind": m.kind} for m in measured],
        "html": str(out.path),
        "bytes": len(text.encode()),
    }
    answer(told, _show, as_json=arguments.json)
    return 0


def _read(paths: Sequence[str]) -> list[Measured]:
    """The files in order.

    Raises:
        SettingsError: one cannot be read.
        UsageError: one is none of these.
    """
    names: Counter[str] = Counter()
    found = []
    for path in paths:
        name = Path(path).name
        names[name] += 1
        shown = name if names[name] == 1 else f"{name} ({names[name]})"
        found.append(Measured(shown, *_known(path)))
    return found


def _known(path: str) -> tuple[str, Any]:
    """What kind of file it is, and what it holds."""
    text = read_text(path, "report", path, most=MAX_BYTES)
    try:
        data = json.loads(text)
        why = f"it holds a {type(data).__name__}"
    except (ValueError, RecursionError) as error:
        data, why = None, f"it is no whole JSON: {error}"
    if isinstance(data, dict):
        if data.get("schema") == SCHEMA and "table" in data:
            try:
                return "table", Tuned.of(data["table"])
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{path}: it is not whole: {quote(error)}") from error
        if data.get("schema") == SCHEMA and "coverage" in data:
            return "coverage", data["coverage"]
        if data.get("schema") == SCHEMA and "results" in data:
            return "verification", data
        why = f"it has schema {data.get('schema')!r:.60}, and no results of these"
    raise UsageError(
        f"{path}: is not the output of `vllm-fl tune --json`, `vllm-fl verify --json` or "
        f"`vllm-fl coverage --json`: {why}"
    )


def _show(facts: Mapping[str, Any]) -> None:
    say(f"{facts['html']}: {facts['bytes'] / 1e6:.2f} MB of {len(facts['files'])} files")
