"""Counts of called and checked torch_npu operators, in this process and its children."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

__all__ = ["count_in", "counted", "note"]

VARIABLE = "EMULATED_NPU_CALLS"
"""Path of the file that gets the line `checked OP` for each checked call."""


def count_in(path: Path) -> None:
    """Start counting in this file, also in child processes."""
    path.touch()
    os.environ[VARIABLE] = str(path)


def note(what: str, op: str) -> None:
    """Add one line in a single write, so lines of several processes do not mix."""
    path = os.environ.get(VARIABLE)
    if path:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{what} {op}\n".encode())
        finally:
            os.close(file)


def counted(what: str = "checked", *, since: int = 0) -> Counter[str]:
    """Operator -> notes of this kind in the file, from size `since` on; "checked" notes are calls
    by schema and meta function."""
    path = os.environ.get(VARIABLE)
    if not path:
        return Counter()
    with open(path) as file:
        file.seek(since)
        return Counter(op for kind, op in map(str.split, file) if kind == what)
