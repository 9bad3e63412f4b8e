"""The tables of docs/trust.md, made from the corpus."""

from __future__ import annotations

import re
from pathlib import Path

from .corpus import KINDS, Wrong, corpus
from .expected import check_of, is_named_at_start

__all__ = ["PAGE", "written"]

PAGE = Path(__file__).parents[4] / "docs" / "trust.md"

MARK = "<!-- {}: written by `python -m wrong_kernels --write` -->"

YET = "{} does not look for it yet"


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
    start = sum(map(is_named_at_start, some))
    kit = sum(bool(check_of(wrong)) for wrong in some)
    neither = sum(not (is_named_at_start(wrong) or check_of(wrong)) for wrong in some)
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
    start, check = is_named_at_start(wrong), check_of(wrong)
    seen = "named" if start else "**no**"
    by = f"`test_{check}`" if check else "**no**"
    reasons = []
    if not start:
        reasons.append(YET.format("start") if wrong.start else wrong.why)
    if not check:
        reasons.append(YET.format("the kit") if wrong.kit else wrong.why)
    why = "; ".join(dict.fromkeys(reasons))
    fault = f"{wrong.fault} ({why})" if why else wrong.fault
    return f"| `{wrong.op}` | {fault} | {seen} | {by} |"
