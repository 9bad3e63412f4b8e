"""`vllm-fl report`: one page of what was measured: tables of `tune`, what `verify`, `coverage` say.

It runs nothing, so that it works on a machine without the device too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from vllm_fl.cli.common import ReportFile, UsageError, print_json, say
from vllm_fl.dispatch import get_default_manager

from ._flashinfer_bench import Dataset, write
from ._measured import Measured, read
from ._page import page


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
    measured = read(arguments.files)
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
    if arguments.json:
        print_json(**told)
        return 0
    if arguments.html:
        say(f"{told['html']}: {told['bytes'] / 1e6:.2f} MB of {len(measured)} files")
    if arguments.flashinfer_bench:
        _show(told["flashinfer_bench"])
    return 0


def _export(measured: Sequence[Measured], path: str) -> dict[str, Any]:
    """Write the dataset, and say what is in it."""
    manager = get_default_manager()
    manager.ensure_initialized(defer_errors=True)
    contracts = manager.registry.snapshot().contracts
    dataset = Dataset()
    for one in measured:
        if one.table is not None:
            dataset.add(one.table, contracts)
        else:
            dataset.left_out.append((one.name, f"a {one.kind} has no times by tokens"))
    target = write(dataset, path)
    return {
        "path": str(target),
        "definitions": len(dataset.definitions),
        "traces": sum(map(len, dataset.traces.values())),
        "left_out": [{"name": name, "reason": reason} for name, reason in dataset.left_out],
    }


def _show(told: dict[str, Any]) -> None:
    say(f"{told['path']}: {told['definitions']} Definitions, {told['traces']} Traces")
    for one in told["left_out"]:
        say(f"  left out: {one['name']}: {one['reason']}")
