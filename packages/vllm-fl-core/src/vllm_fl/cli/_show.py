"""Tables for people, JSON for programs. Neither prints a secret."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from ..text import clean, scrub

__all__ = ["UsageError", "answering", "print_json", "print_table", "say"]

SCHEMA = 1

_answers: TextIO | None = None
"""Where answers go; None: to standard output as it is."""


class UsageError(Exception):
    """The command line asks for something that does not exist or cannot be done: exit status 2."""


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """In the block, only our answers go to standard output; logs of vLLM or a compiler do not."""
    global _answers
    before, _answers = _answers, sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _answers = before


def print_json(**content: Any) -> None:
    """One JSON object with the schema's number."""
    text = json.dumps(_scrubbed({"schema": SCHEMA, **content}), indent=2, allow_nan=False)
    print(text, file=_answers)


def say(text: str = "", *, error: bool = False) -> None:
    """Text of our own, foreign words cleaned; on stderr with `error`.

    Foreign text that may hold line breaks is passed through `clean` before it gets here.
    """
    lines = map(clean, text.split("\n"))
    print("\n".join(lines), file=sys.stderr if error else _answers)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A plain table. Cells are text, never markup; what is too wide is folded, never cut.

    It is as wide as the terminal, or COLUMNS; 200 characters where there is neither.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, file=_answers)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    cells = [["-" if cell is None else clean(str(cell)) for cell in row] for row in rows]
    columns = list(zip(headings, *cells, strict=True))
    widths = _widths(columns, console.width - 2 * len(columns))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(heading, overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """The columns' widths in `room`: the widest gives way first, and words break last."""
    widths = [max(map(len, column)) for column in columns]
    words = [max(max(map(len, cell.split()), default=1) for cell in column) for column in columns]
    for least in (words, [1] * len(columns)):
        while sum(widths) > room:
            spare = [width - floor for width, floor in zip(widths, least, strict=True)]
            if max(spare) <= 0:
                break
            widest = max((w, n) for n, w in enumerate(widths) if spare[n] > 0)[1]
            widths[widest] -= 1
    return widths


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {key: _scrubbed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(item) for item in value]
    return value
