"""Prints tables for people and JSON for programs, without secrets."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from vllm_fl.errors import VllmFLError
from vllm_fl.text import clean, scrub

OUTPUT_SCHEMA = 1

INCOMPLETE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of code that reads the data of an incomplete file."""

_answers: TextIO | None = None
"""Output for answers; None for the current standard output."""

_last_said = 0.0


class UsageError(VllmFLError):
    """The command line names something that does not exist or cannot be done: exit status 2."""

    code = "FL701"


@contextlib.contextmanager
def answering(to: TextIO | None = None) -> Iterator[None]:
    """In the block, only answers go to standard output; logs of vLLM or a compiler go to stderr.

    With `to`, the answers go there instead.
    """
    global _answers
    before, _answers = _answers, to or sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _answers = before


def print_answer(
    facts: Mapping[str, Any], show: Callable[[Mapping[str, Any]], None], *, as_json: bool
) -> None:
    """Print the answer of a verb: as a JSON object with the schema's number, or with `show`.

    Raises:
        UsageError: the answer has a number that JSON cannot represent.
    """
    if not as_json:
        return show(facts)
    try:
        text = json.dumps(_scrubbed({"schema": OUTPUT_SCHEMA, **facts}), indent=2, allow_nan=False)
    except ValueError as error:
        raise UsageError("--json: the answer has an infinite number or NaN: omit --json") from error
    print(text, file=_answers)


def say(text: str = "", *, error: bool = False) -> None:
    """Print text without control characters; to stderr with `error`.

    Call `clean` on third-party text that may have line breaks.
    """
    global _last_said
    _last_said = time.monotonic()
    cleaned = "\n".join(map(clean, text.split("\n")))
    print(cleaned, file=sys.stderr if error else _answers)


def last_said() -> float:
    """Return the time of the last call of `say`, by `time.monotonic`; 0 before the first."""
    return _last_said


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a plain table. Cells are text, not markup; long cells are wrapped, not truncated.

    It is as wide as the terminal or COLUMNS, or else 200 characters.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plain = "NO_COLOR" in os.environ
    console = Console(highlight=False, file=_answers, color_system=None if plain else "auto")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else clean(str(cell))) for cell in row))
    console.print(table)


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {key: _scrubbed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(item) for item in value]
    return value
