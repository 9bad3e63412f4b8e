"""`vllm-fl report`: one page of what was measured: tables of `vllm-fl tune`, runs of `verify`.

It reads files alone, so that it runs anywhere, on a machine without the device too.
"""

from __future__ import annotations

import argparse

from ._measured import read
from ._page import page
from ._report import ReportFile
from ._show import print_json, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is read, and where the page goes."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a table of `vllm-fl tune`, or what `vllm-fl verify --json` printed",
    )
    parser.add_argument("--html", required=True, metavar="OUT", help="write the page there")


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 when the page was written."""
    measured = read(arguments.files)
    with ReportFile(arguments.html, "--html") as out:
        text = page(measured)
        out.write(text)
    if arguments.json:
        files = [
            {"name": m.name, "kind": "table" if m.table is not None else "verification"}
            for m in measured
        ]
        print_json(html=str(out.path), bytes=len(text.encode()), files=files)
    else:
        say(f"{out.path}: {len(text.encode()) / 1e6:.2f} MB of {len(measured)} files")
    return 0
