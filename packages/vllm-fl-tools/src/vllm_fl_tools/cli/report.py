"""`vllm-fl report`: one page of what was measured: tables of `tune`, what `verify`, `coverage` say.

It runs nothing, so that it works on a machine without the device too.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_fl.cli.common import SCHEMA, ReportFile, UsageError, answer, say
from vllm_fl.dispatch import get_default_manager
from vllm_fl.settings.table import MAX_BYTES, read_table
from vllm_fl.settings.values import read_text

from ._flashinfer_bench import Dataset, write
from ._page import Measured, page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is read, and where the page goes."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a table of `vllm-fl tune`, or what `verify --json` or `coverage --json` printed",
    )
    parser.add_argument("--html", metavar="OUT", help="write the page there")
    parser.add_argument(
        "--flashinfer-bench",
        metavar="DIR",
        help="write the tables there as a dataset of FlashInfer-Bench: Definitions and Traces",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 when what was asked for was written."""
    if not (arguments.html or arguments.flashinfer_bench):
        raise UsageError("report: say where it goes: --html OUT, --flashinfer-bench DIR, or both")
    measured = _read(arguments.files)
    told: dict[str, Any] = {"files": [{"name": m.name, "kind": m.kind} for m in measured]}
    with ExitStack() as stack:
        if arguments.html:
            out = stack.enter_context(ReportFile(arguments.html, "--html"))
            text = page(measured)
        if arguments.flashinfer_bench:
            told["flashinfer_bench"] = _export(measured, arguments.flashinfer_bench)
        if arguments.html:
            out.write(text)
            told |= {"html": str(out.path), "bytes": len(text.encode())}
    answer(told, _show, as_json=arguments.json)
    return 0


def _read(paths: Sequence[str]) -> list[Measured]:
    """The files in order.

    Raises:
        SettingsError: one cannot be read, or is a table that is not whole.
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
        if "vllm_fl_table" in data:
            return "table", read_table(path, key="report", origin=path)
        if data.get("schema") == SCHEMA and "coverage" in data:
            return "coverage", data["coverage"]
        if data.get("schema") == SCHEMA and "results" in data:
            return "verification", data
        why = f"it has schema {data.get('schema')!r:.60}, and no results of these"
    raise UsageError(
        f"{path}: is neither a table that `vllm-fl tune` wrote nor the output of "
        f"`vllm-fl verify --json` or `vllm-fl coverage --json`: {why}"
    )


def _export(measured: Sequence[Measured], path: str) -> dict[str, Any]:
    """Write the dataset, and say what is in it."""
    manager = get_default_manager()
    manager.ensure_initialized(defer_errors=True)
    contracts = manager.registry.snapshot().contracts
    dataset = Dataset()
    for one in measured:
        if one.kind == "table":
            dataset.add(one.content, contracts)
        else:
            dataset.left_out.append((one.name, f"a {one.kind} has no times by tokens"))
    target = write(dataset, path)
    return {
        "path": str(target),
        "definitions": len(dataset.definitions),
        "traces": sum(map(len, dataset.traces.values())),
        "left_out": [{"name": name, "reason": reason} for name, reason in dataset.left_out],
    }


def _show(facts: Mapping[str, Any]) -> None:
    if "html" in facts:
        say(f"{facts['html']}: {facts['bytes'] / 1e6:.2f} MB of {len(facts['files'])} files")
    if told := facts.get("flashinfer_bench"):
        say(f"{told['path']}: {told['definitions']} Definitions, {told['traces']} Traces")
        for one in told["left_out"]:
            say(f"  left out: {one['name']}: {one['reason']}")
