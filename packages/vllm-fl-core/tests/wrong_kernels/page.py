"""The tables of docs/trust.md, made from the corpus."""

from __future__ import annotations

import re
from pathlib import Path

from .corpus import KINDS, Wrong, corpus

__all__ = ["PAGE", "written"]

PAGE = Path(__file__).parents[4] / "docs" / "trust.md"

MARK = "<!-- {}: written by `python -m wrong_kernels --write` -->"


def written(text: str) -> str:
    """The page with its two tables as they should be.

    Raises:
        ValueError: the page has lost a mark between which a table stands.
    """
    for name, table in (("counts", _counts()), ("kernels", _kernels())):
        begin, end = MARK.format(name), f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.S)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{PAGE.name} needs {begin!r} and {end!r}, once")
        block = f"{begin}\n\n{table}\n\n{end}"
        text = pattern.sub(lambda _, block=block: block, text)
    return text


def _counts() -> str:
    lines = [
        "| kind of fault | kernels | start names | kit names | neither |",
        "|---|---|---|---|---|",
    ]
    every = list(corpus().values())
    for kind in KINDS:
        lines.append(
            f"| {kind}: {KINDS[kind]} | {_numbers([w for w in every if w.kind == kind])} |"
        )
    return "\n".join([*lines, f"| all | {_numbers(every)} |"])


def _numbers(some: list[Wrong]) -> str:
    start = sum(wrong.start for wrong in some)
    kit = sum(bool(wrong.kit) for wrong in some)
    neither = sum(not (wrong.start or wrong.kit) for wrong in some)
    return f"{len(some)} | {start} | {kit} | {neither}"


def _kernels() -> str:
    parts = []
    for kind in KINDS:
        lines = [
            f"### {kind.capitalize()}",
            "",
            "| op | fault | start | kit |",
            "|---|---|---|---|",
        ]
        lines += [_row(wrong) for wrong in corpus().values() if wrong.kind == kind]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(wrong: Wrong) -> str:
    start = "named" if wrong.start else "**no**"
    kit = f"`test_{wrong.kit}`" if wrong.kit else "**no**"
    fault = f"{wrong.fault} ({wrong.why})" if wrong.why else wrong.fault
    return f"| `{wrong.op}` | {fault} | {start} | {kit} |"
