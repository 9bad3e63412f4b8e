"""The page of `vllm-fl show --html`: one file of tables and plots, without scripts.

`page.html` in this folder is its template, which calls the functions of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_fl.text import clean, quote

from ..engine.tuning_table import KEEP_DEFAULT, Figure, Tuned, TunedOp
from . import _plots
from ._coverage import answers, row_label, sums
from ._show import INCOMPLETE, UsageError

KINDS = ("table", "verification", "coverage")
"""Kinds of files, in the order of the page."""


@dataclass(frozen=True)
class ResultFile:
    """One file.

    Args:
        name: the file's name.
        kind: `table`, `verification` or `coverage`.
        content: a `Tuned`, or the output of `verify --json` or `tune --profile --json`.
    """

    name: str
    kind: str
    content: Any


def benchmark_report(measured: Sequence[ResultFile]) -> str:
    """Return the page of these files, grouped by kind; equal for the same files.

    Raises:
        UsageError: a file is incomplete, or a plot needs matplotlib, which is not installed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
    from markupsafe import Markup

    tables = [one.content for one in measured if one.kind == "table"]
    if tables:
        _plots.require()
    look = _plots.looks([impl for table in tables for impl in impls_of(table.ops.values())])

    def plot(key: str, op: TunedOp) -> Markup:
        serving = {t: op.chosen(t) for t in tokens_of(op)}
        return Markup(_plots.drawing(key, op.figures, serving, look))

    def text(value: Any) -> Any:
        """Remove characters of a file that affect a terminal or a log."""
        return value if isinstance(value, Markup | int) else clean(value)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    of_table = (impls_of, tokens_of, figure_of, why, not_chosen, table_versions)
    asked = (*of_table, cells, failed_samples, answers, row_label, sums, microseconds)
    environment.globals |= {each.__name__: each for each in asked}
    environment.globals |= {"looks": look, "plot": plot, "colours": _plots.COLOURS}
    made: Any = environment.get_template("page.html").module
    rows, sections = [], []
    for number, one in enumerate(measured, 1):
        try:
            rows.append(made.summary(f"t{number}", one))
            sections.append((one.kind, made.section(f"t{number}", one)))
        except (*INCOMPLETE, TemplateError) as error:
            raise UsageError(
                f"{one.name}: incomplete: {quote(error)}; write the file again"
            ) from error
    sections.sort(key=lambda section: KINDS.index(section[0]))
    return str(made.page(rows, sections))


# Functions of a table, for the template.


def impls_of(ops: Iterable[TunedOp]) -> list[str]:
    """Return every implementation in these results."""
    found = set()
    for op in ops:
        found |= {op.default, *(f.impl for f in op.figures), *(row.impl for row in op.rows)}
    return sorted(found - {KEEP_DEFAULT})


def tokens_of(op: TunedOp) -> list[int]:
    """Return the measured numbers of tokens, and the ends of rows."""
    return sorted({f.tokens for f in op.figures} | {row.up_to for row in op.rows})


def figure_of(op: TunedOp, tokens: int, impl: str) -> Figure | None:
    return next((f for f in op.figures if (f.tokens, f.impl) == (tokens, impl)), None)


def why(op: TunedOp, tokens: int) -> str:
    """Return the reason for the choice at this number of tokens, with its ratio."""
    impl = op.chosen(tokens)
    if impl != op.default:
        figure = figure_of(op, tokens, impl)
        if figure is None or figure.ratio is None:
            return "by the row for more tokens; not compared here"
        return f"faster than the default: {_compared(figure)}"
    others = [f for f in op.figures if f.tokens == tokens and f.impl != op.default]
    best = max(others, key=lambda f: f.ratio or 0, default=None)
    if best is None:
        return "no other implementation was measured here"
    reasons = []
    if best.ratio is not None:
        lost = (
            "slower in one of the op's calls, or to launch" if best.slower else "not enough faster"
        )
        reasons.append(f"the fastest other, {best.impl}, {lost}: {_compared(best)}")
    if wrong := sum(bool(f.rejected) for f in others):
        reasons.append(f"{wrong} rejected")
    return "; ".join(reasons)


def _compared(figure: Figure) -> str:
    low = "" if figure.ratio_low is None else f"lower quartile ×{figure.ratio_low:.3f}, "
    return f"×{figure.ratio:.3f} ({low}n {figure.n})"


def not_chosen(op: TunedOp) -> list[tuple[str, str, str]]:
    """Return (implementation, tokens, reason) of rejected and slower ones, each reason once."""
    found: dict[tuple[str, str], list[int]] = {}
    for figure in op.figures:
        for said, reason in (("rejected", figure.rejected), ("slower", figure.slower)):
            if reason:
                found.setdefault((figure.impl, f"{said}: {reason}"), []).append(figure.tokens)
    return [
        (impl, ", ".join(map(str, sorted(tokens))), reason)
        for (impl, reason), tokens in sorted(found.items())
    ]


def table_versions(table: Tuned) -> dict[str, str]:
    holds = table.holds
    return {"device": holds["device"], "vllm": holds.get("vllm") or "–", **holds["distributions"]}


# Functions of a verification, for the template.


def cells(
    results: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[tuple[str, str], dict[str, Mapping[str, Any]]]]:
    """Yield (op, implementation) and its results by dtype."""
    for pair, of_pair in groupby(sorted(results, key=_pair), _pair):
        yield pair, {result["dtype"]: result for result in of_pair}


def _pair(result: Mapping[str, Any]) -> tuple[str, str]:
    return result["op"], result["impl_id"]


def failed_samples(
    results: Iterable[Mapping[str, Any]],
) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Return (op, implementation, status, reason) of samples that are not ok, unsupported last,
    with their dtypes, samples and errors (x tolerance)."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for result in sorted(results, key=_pair):
        for finding in result["findings"]:
            key = (*_pair(result), finding["status"], finding["reason"])
            row = rows.setdefault(key, {"dtypes": {}, "samples": {}, "shares": [0.0]})
            row["dtypes"][result["dtype"]] = row["samples"][finding["sample"]] = None
            row["shares"].append(finding["share"] or 0.0)
    return sorted(rows.items(), key=lambda row: row[0][2] == "refused")


def microseconds(value: float) -> str:
    """Format a time with about three significant digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
