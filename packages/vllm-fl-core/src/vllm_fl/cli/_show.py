"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["print_json", "print_table"]

SCHEMA = 1


def print_json(**content: Any) -> None:
    """One JSON object with the schema's number."""
    print(json.dumps({"schema": SCHEMA, **content}, indent=2))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A plain table. Cells are text, never markup; nothing is cut off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 200)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    console.print(table)
