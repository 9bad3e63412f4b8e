"""Tables for people, JSON for programs. Neither prints a secret."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from vllm_fl.errors import VllmFLError
from vllm_fl.text import clean, scrub

SCHEMA = 1

_answers: TextIO | None = None
"""Where answers go; None: to standard output as it is."""

_last_said = 0.0


class UsageError(VllmFLError):
    """The command line asks for something that does not exist or cannot be done: exit status 2."""

    code = "FL701"


@contextlib.contextmanager
def answering(to: TextIO | None = None) -> Iterator[None]:
    """In the block, only our answers go to standard output; logs of vLLM or a compiler do not.

    Args:
        to: where answers go; None: to standard output.
    """
    global _answers
    before, _answers = _answers, to or sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _answers = before


def answer(
    facts: Mapping[str, Any], show: Callable[[Mapping[str, Any]], None], *, as_json: bool
) -> None:
    """The answer of a verb, from one value: as JSON, or as `show` prints it for people."""
    if as_json:
        print_json(**facts)
    else:
        show(facts)


def print_json(**content: Any) -> None:
    """One JSON object with the schema's number."""
    text = json.dumps(_scrubbed({"schema": SCHEMA, **content}), indent=2, allow_nan=False)
    print(text, file=_answers)


def say(text: str = "", *, error: bool = False) -> None:
    """Text of our own, foreign words cleaned; on stderr with `error`.

    On a terminal an answer is folded at words. Errors are not: they end with a command that must be
    copied whole. Foreign text that may hold line breaks is passed through `clean` before it gets
    here.
    """
    global _last_said
    _last_said = time.monotonic()
    cleaned = "\n".join(map(clean, text.split("\n")))
    if not error and (_answers or sys.stdout).isatty():
        cleaned = folded(cleaned, shutil.get_terminal_size().columns)
    print(cleaned, file=sys.stderr if error else _answers)


_MARKER = re.compile(r" *(?:\d+\. +|- +|\w+: +)?")
"""What a line begins with, and what its further lines are indented by: `  - `, `   Why: `."""

_COMMAND = re.compile(r" *Do: ")
"""A line that has, or is, a command to copy."""


def folded(text: str, width: int) -> str:
    """`text` with lines of at most `width` characters, but for longer words.

    A paragraph that was written for wider lines is filled anew, not line by line.
    """
    found, rest = [], text.split("\n")
    while rest:
        line = rest.pop(0)
        if len(line) <= width or _COMMAND.match(line):
            found.append(line)
            continue
        own = len(line) - len(line.lstrip())
        hang = None
        while rest and rest[0].strip():
            deep = len(rest[0]) - len(rest[0].lstrip())
            if deep not in ((own, own + 4) if hang is None else (hang,)):
                break
            if len(_marker(rest[0])) > deep:
                break
            hang = deep
            line = f"{line} {rest.pop(0).strip()}"
        further = " " * (len(_marker(line)) if hang is None else hang)
        found.append(_filled(line, width, further))
    return "\n".join(found)


def _filled(line: str, width: int, further: str) -> str:
    return textwrap.fill(
        line,
        width,
        subsequent_indent=further,
        break_long_words=False,  # paths and commands are copied
        break_on_hyphens=False,
    )


def _marker(line: str) -> str:
    found = _MARKER.match(line)
    return found[0] if found else ""


def last_said() -> float:
    """When `say` was called last, by the clock of `time.monotonic`; 0 where it was not."""
    return _last_said


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A plain table. Cells are text, never markup; what is too wide is folded, never cut.

    It is as wide as the terminal, or COLUMNS; 200 characters where there is neither. Where words
    would break, such as paths, there are a few lines for each row in its place, without the cells
    that are None.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plain = "NO_COLOR" in os.environ
    console = Console(highlight=False, file=_answers, color_system=None if plain else "auto")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    cells = [["-" if cell is None else clean(str(cell)) for cell in row] for row in rows]
    columns = list(zip(headings, *cells, strict=True))
    room = console.width - 2 * len(columns)
    if sum(map(_longest_word, columns)) > room:
        for row in cells:
            _print_row(headings, row, console.width)
        return
    widths = _widths(columns, room)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(heading, overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_row(headings: Sequence[str], cells: Sequence[str], width: int) -> None:
    """One row as lines: its first cell, and beneath it the others with their headings."""
    first, *others = cells
    indent = max(map(len, headings[1:]), default=0) + 4
    print(first, file=_answers)
    for heading, cell in zip(headings[1:], others, strict=True):
        if cell != "-":
            line = f"  {heading}".ljust(indent) + cell
            print(_filled(line, width, " " * indent), file=_answers)


def _longest_word(column: Sequence[str]) -> int:
    return max(max(map(len, cell.split()), default=1) for cell in column)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """The columns' widths in `room`, where the longest words fit: the widest gives way first."""
    widths = [max(map(len, column)) for column in columns]
    least = [*map(_longest_word, columns)]
    while sum(widths) > room:
        spare = ((width, n) for n, width in enumerate(widths) if width > least[n])
        widths[max(spare)[1]] -= 1
    return widths


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {key: _scrubbed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(item) for item in value]
    return value
