"""The page that `vllm-fl report --html` writes: one file, without scripts, of tables and plots."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from vllm_fl.cli.common import UsageError
from vllm_fl.settings.table import DEFAULT, Figure, Table, TunedOp
from vllm_fl.text import clean, quote

from . import _plots
from ._coverage import named, sums
from ._plots import Look, Point
from ._style import STYLE

__all__ = ["Measured", "page"]

COMPARED = (
    "Of those that beat the default, the one with the fewest µs in its finals, the further rounds "
    "of the fastest few, serves; where one choice holds for a range of sizes, the fastest over all "
    "of it. Ratios of different n come from different rounds and do not compare."
)


class Markup(str):
    """Text that is HTML already. All other text is escaped where it is put in."""


@dataclass(frozen=True)
class Measured:
    """One file.

    Args:
        name: what the page calls it: the file's name, numbered where two have the same.
        kind: `table`, `verification` or `coverage`.
        content: a `Table`, or what `verify --json` or `coverage --json` printed.
    """

    name: str
    kind: str
    content: Any


def page(measured: Sequence[Measured]) -> str:
    """The page of these files, those of one kind together; the same for the same files.

    Raises:
        UsageError: one is not whole; or there is something to draw, and matplotlib is missing.
    """
    tables = [(one.name, one.content) for one in measured if one.kind == "table"]
    if tables:
        _plots.require()
    look = _plots.looks([impl for _, table in tables for impl in _impls(table)])
    parts: dict[str, list[Markup]] = {kind: [] for kind in SECTIONS}
    rows = []
    for number, one in enumerate(measured, 1):
        key = f"t{number}"
        try:
            what, verdict, section = SECTIONS[one.kind](key, one.content, look)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{one.name}: it is not whole, or was changed by hand: {quote(error)}; write it "
                "anew"
            ) from error
        rows.append((_link(key, one.name), f"{one.kind}: {what}", verdict))
        parts[one.kind].append(_el("section", _el("h2", one.name, id=key), *section))
    comparison = list(_comparison(tables))
    title = {"table": "Measured choice", "verification": "Verification", "coverage": "Coverage"}
    body = [
        _el("h1", next(title[kind] for kind, sections in parts.items() if sections)),
        _table("files", "What is on this page", ("file", "what it is", "verdict"), rows),
        *(_el("p", _link("comparison", "Comparison of the tables")) for _ in comparison),
        *parts["table"],
        *comparison,
        *parts["verification"],
        *parts["coverage"],
    ]
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>vllm-fl report</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


Section = tuple[str, Markup, list[Markup]]
"""What a file says it is of, the verdict, and the elements of its section."""


# ---------------------------------------------------------------------------------------------
# A table


def _table_section(key: str, table: Table, look: Mapping[str, Look]) -> Section:
    facts = {
        "model": table.model or "–",
        "mode": table.mode,
        "dtype": table.dtype,
        "measured": f"{table.date}, in {table.seconds:.0f} s",
        "digest": table.digest,
        **{f"size: {size}": f"{value:g}" for size, value in sorted(table.sizes.items())},
    }
    ops = [
        _op_section(f"{key}-{n}", op, table.ops[op], look)
        for n, op in enumerate(sorted(table.ops), 1)
    ]
    verdict, told = _verdict(table)
    same = "Measured with: all of this must be the same"
    pairs = _pairs(f"{key}-for", "Measured for", facts), _pairs(f"{key}-with", same, table.identity)
    section = [
        _el("p", verdict, f" {told}", class_="verdict"),
        _el("div", *pairs, class_="beside"),
        _el("h3", "What serves, by tokens"),
        _el("p", _marks(_impls(table), look), class_="legend"),
        _overview(key, table, look),
        *ops,
    ]
    return f"{table.model}, {table.mode}, {table.dtype}", verdict, section


def _verdict(table: Table) -> tuple[Markup, str]:
    found = table.accepted
    if found is None:
        return _badge("open", "not yet accepted"), (
            "It acts only when it is told to; vllm-fl tune --accept FILE --model DIR serves a "
            "model with it."
        )
    figures = ", ".join(f"{name} {value:g}" for name, value in sorted(found.figures.items()))
    more = f" ({figures})" if figures else ""
    badge = _badge("good", "accepted") if found.accepted else _badge("bad", "not accepted")
    return badge, f"{found.reason}{more}, {found.date}"


def _overview(key: str, table: Table, look: Mapping[str, Look]) -> Markup:
    tokens = sorted({t for op in table.ops.values() for t in _tokens(op)})
    rows = []
    for number, (name, op) in enumerate(sorted(table.ops.items()), 1):
        measured = {*_tokens(op)}
        cells = [_overview_cell(op, t, look) if t in measured else Markup("") for t in tokens]
        rows.append((_link(f"{key}-{number}", name), op.default, *cells))
    return _table(
        f"{key}-overview",
        "What serves at each number of tokens, and how many times as fast as the default it is. "
        "The mark before a number says which implementation serves; “·”: the default itself.",
        ("op", "default", *map(str, tokens)),
        rows,
        class_="dense",
    )


def _overview_cell(op: TunedOp, tokens: int, look: Mapping[str, Look]) -> Markup:
    impl = _serves(op, tokens)
    if impl == op.default:
        return _join(_el("span", "·", aria_hidden="true"), _el("span", "default", class_="told"))
    figure = _figure(op, tokens, impl)
    ratio = "" if figure is None or figure.ratio is None else f" {figure.ratio:.2f}"
    return _join(_sign(impl, look), _el("span", impl, class_="told"), ratio)


def _op_section(key: str, name: str, op: TunedOp, look: Mapping[str, Look]) -> Markup:
    impls = sorted({f.impl for f in op.figures} | {op.default})
    parts = [
        _el("h3", name, id=key),
        _el(
            "p",
            "Default: ",
            _el("code", op.default),
            "; contract ",
            _el("code", op.contract),
            ".",
        ),
    ]
    if any(_drawn(f.us) for f in op.figures):
        parts.append(_el("p", _marks(impls, look), class_="legend"))
        parts.append(_op_plots(key, name, op, look))
    if op.figures or op.rows:
        parts.append(_choice(key, name, op, look))
    if op.figures:
        parts.append(_times_table(key, name, op, impls, look))
        parts.append(_el("p", COMPARED))
    else:
        parts.append(_el("p", "Nothing of it was measured."))
    for what, caption, said in (
        ("rejected", "rejected, not timed", attrgetter("rejected")),
        (
            "slower",
            "slower in one of the op's calls, or to launch, so that it serves none",
            attrgetter("slower"),
        ),
    ):
        if rows := _reasons(op, said, look):
            headings = ("implementation", "at tokens", "reason")
            parts.append(_table(f"{key}-{what}", f"{name}: {caption}", headings, rows))
    return _el("section", *parts, class_="op")


def _reasons(
    op: TunedOp, said: Callable[[Figure], str], look: Mapping[str, Look]
) -> list[tuple[str, ...]]:
    """What is said of implementations, each reason once, with the tokens at which it holds."""
    found: dict[tuple[str, str], list[int]] = {}
    for figure in op.figures:
        if reason := said(figure):
            found.setdefault((figure.impl, reason), []).append(figure.tokens)
    return [
        (_named(impl, look), ", ".join(map(str, sorted(where))), reason)
        for (impl, reason), where in sorted(found.items())
    ]


def _op_plots(key: str, name: str, op: TunedOp, look: Mapping[str, Look]) -> Markup:
    rejected: dict[str, list[int]] = {}
    for figure in op.figures:
        if figure.rejected:
            rejected.setdefault(figure.impl, []).append(figure.tokens)

    def lines(share: bool) -> dict[str, list[Point]]:
        found: dict[str, list[Point]] = {}
        for f in op.figures:
            value = f.copy_share if share else f.us
            if value is None or not _drawn(value):
                continue
            serves = _serves(op, f.tokens) == f.impl
            point = Point(f.tokens, value, f.low, f.high, serves)
            if share:
                point = Point(f.tokens, value * 100, serves=serves)
            found.setdefault(f.impl, []).append(point)
        return dict(sorted(found.items()))

    figures = []
    for what, label, share in (
        ("time", "µs per call", False),
        ("copy", "share of the copy bandwidth", True),
    ):
        if drawn := lines(share):
            svg = _plots.drawing(
                f"{key}-{what}", drawn, rejected if not share else {}, look, label, not share
            )
            title = f"{label} by tokens"
            about = (
                f"Plot of {name}, {title}, of {', '.join(drawn)}; the table below has the values."
            )
            image = _el("div", Markup(svg), role="img", aria_label=about)
            figures.append(_el("figure", image, _el("figcaption", title)))
    return _el("div", *figures, class_="plots")


def _choice(key: str, name: str, op: TunedOp, look: Mapping[str, Look]) -> Markup:
    rows = []
    for tokens in _tokens(op):
        impl = _serves(op, tokens)
        why, compared = _why(op, tokens, impl)
        ratio, low, n = ("–",) * 3
        if compared is not None:
            ratio = _times(compared.ratio)
            low, n = _times(compared.ratio_low), str(compared.n)
        rows.append((str(tokens), _served_by(op, impl, look), ratio, low, n, why))
    if op.rows:
        above = f"above {op.rows[-1].up_to}"
        served = _served_by(op, op.default, look)
        rows.append((above, served, "–", "–", "–", "beyond the last row"))
    caption = (
        f"{name}: what serves, and why. Of an implementation that serves in the default's place, "
        "how many times as fast it is (median of pairs measured next to each other); where the "
        "default stays, the same of the fastest other one."
    )
    headings = ("tokens", "served by", "times as fast", "lower quartile", "n", "why")
    return _table(f"{key}-choice", caption, headings, rows)


def _served_by(op: TunedOp, impl: str, look: Mapping[str, Look]) -> Markup:
    return _join(_named(impl, look), " (default)" if impl == op.default else "")


def _why(op: TunedOp, tokens: int, impl: str) -> tuple[str, Figure | None]:
    """Why it serves, and the figure that says so."""
    if impl != op.default:
        figure = _figure(op, tokens, impl)
        if figure is None or figure.ratio is None:
            return "by the row of more tokens; not compared here", None
        return "faster than the default", figure
    others = [f for f in op.figures if f.tokens == tokens and f.impl != op.default]
    timed = [f for f in others if f.ratio is not None]
    best = max(timed, key=lambda f: f.ratio or 0, default=None)
    told = []
    if best is not None and best.slower:
        told.append(
            f"the fastest other, {best.impl}, is slower in one of the op's calls, or to launch"
        )
    elif best is not None:
        told.append(f"no other was faster by enough; the fastest of them: {best.impl}")
    elif not others:
        told.append("no other was measured here")
    if wrong := sum(bool(f.rejected) for f in others):
        told.append(f"{wrong} rejected")
    return "; ".join(told), best


def _times_table(
    key: str, name: str, op: TunedOp, impls: Sequence[str], look: Mapping[str, Look]
) -> Markup:
    rows = []
    for tokens in sorted({f.tokens for f in op.figures}):
        cells = [_times_cell(_figure(op, tokens, impl), _serves(op, tokens)) for impl in impls]
        rows.append((str(tokens), *cells))
    return _table(
        f"{key}-times",
        f"{name}: median µs per call with quartiles and n; times as fast as the default, with the "
        "lower quartile (low); share of the copy bandwidth. What serves is bold.",
        ("tokens", *(_named(impl, look) for impl in impls)),
        rows,
    )


def _times_cell(figure: Figure | None, serves: str) -> Markup:
    if figure is None:
        return _el("span", "–", class_="more")
    if figure.rejected:
        return _badge("bad", "rejected")
    if figure.us is None:
        return _el("span", "not timed", class_="more")
    spread = (
        ""
        if figure.low is None or figure.high is None
        else f"{_us(figure.low)}–{_us(figure.high)}, "
    )
    more = [f"{spread}n {figure.n}"]
    if figure.ratio is not None:
        low = "" if figure.ratio_low is None else f" (low {figure.ratio_low:.3f})"
        more.append(f"{_times(figure.ratio)}{low}")
    if figure.copy_share is not None:
        more.append(f"{figure.copy_share * 100:.3g} % of copy")
    time = _el("b" if figure.impl == serves else "span", _us(figure.us))
    return _join(time, *(_el("span", text, class_="more") for text in more))


def _impls(table: Table) -> list[str]:
    """Every implementation that it names."""
    named = {f.impl for op in table.ops.values() for f in op.figures}
    named |= {op.default for op in table.ops.values()}
    named |= {row.impl for op in table.ops.values() for row in op.rows}
    return sorted(named - {DEFAULT})


def _tokens(op: TunedOp) -> list[int]:
    """Where it was measured, and where its rows end."""
    return sorted({f.tokens for f in op.figures} | {row.up_to for row in op.rows})


def _serves(op: TunedOp, tokens: int) -> str:
    """The implementation of a call with so many tokens."""
    impl = next((row.impl for row in op.rows if tokens <= row.up_to), DEFAULT)
    return op.default if impl == DEFAULT else impl


def _figure(op: TunedOp, tokens: int, impl: str) -> Figure | None:
    return next((f for f in op.figures if (f.tokens, f.impl) == (tokens, impl)), None)


def _drawn(value: float | None) -> bool:
    """Whether a logarithmic axis has a place for it."""
    return value is not None and 0 < value < float("inf")


# ---------------------------------------------------------------------------------------------
# Several tables


def _comparison(tables: Sequence[tuple[str, Table]]) -> Iterator[Markup]:
    """The ops that more than one table holds: what serves in each, and its time."""
    held_by = Counter(op for _, table in tables for op in table.ops)
    shared = sorted(op for op, number in held_by.items() if number > 1)
    if not shared:
        return
    names = [name for name, _ in tables]
    fields = sorted({field for _, table in tables for field in table.identity})
    parts = [_el("h2", "Comparison of the tables", id="comparison")]
    rows = []
    for field in ("mode", "dtype", "model", *fields):
        values = [
            str(getattr(t, field))
            if field not in t.identity and hasattr(t, field)
            else t.identity.get(field, "–")
            for _, t in tables
        ]
        same = "same" if len({*values}) == 1 else _badge("open", "differs")
        rows.append((field, *values, same))
    headings = ("", *names, "")
    parts.append(_table("comparison-with", "What they were measured with", headings, rows))
    for number, op in enumerate(shared, 1):
        held = [(name, table.ops[op]) for name, table in tables if op in table.ops]
        tokens = sorted({t for _, tuned in held for t in _tokens(tuned)})
        lines = [
            (
                str(t),
                *(cell for _, tuned in held for cell in _served_cell(tuned, t)),
                _against(held, t),
            )
            for t in tokens
        ]
        headings = (
            "tokens",
            *(text for name, _ in held for text in (f"{name}: served by", "µs")),
            "last ÷ first",
        )
        parts.append(_table(f"comparison-{number}", f"{op}: what serves", headings, lines))
    yield _el("section", *parts)


def _served_cell(op: TunedOp, tokens: int) -> tuple[str, str]:
    if tokens not in _tokens(op):
        return "–", "–"
    impl = _serves(op, tokens)
    figure = _figure(op, tokens, impl)
    return impl, "–" if figure is None or figure.us is None else _us(figure.us)


def _against(held: Sequence[tuple[str, TunedOp]], tokens: int) -> str:
    """The last table's time by the first one's, of what serves in each."""
    figures = [_figure(op, tokens, _serves(op, tokens)) for _, op in (held[0], held[-1])]
    first, last = (f.us if f is not None else None for f in figures)
    return f"{last / first:.2f}" if first and last is not None else "–"


# ---------------------------------------------------------------------------------------------
# A verification


def _run_section(key: str, run: Mapping[str, Any], look: Mapping[str, Look]) -> Section:
    environment = run["environment"]
    device = environment["device"]
    facts = {
        **{f"device: {k}": str(v) for k, v in device.items()},
        "system": environment["system"],
        "Python": environment["python"],
        **environment["distributions"],
        "date": run["date"],
    }
    bad = sum(r["samples"]["wrong"] + r["samples"]["raised"] for r in run["results"])
    verdict = _badge("bad", f"{bad} wrong") if bad else _badge("good", "none wrong")
    if not (run["results"] and run.get("complete", True)):
        verdict = _join(verdict, " ", _badge("bad", "not all of it was run"))
    parts = []
    if environment["emulated"]:
        told = f" {environment['emulated']}. No such hardware was used."
        parts.append(_el("p", _badge("open", "emulated"), told, class_="verdict"))
    if not run.get("complete", True):
        told = " What was not run is listed below."
        parts.append(_el("p", _badge("bad", "cut short"), told, class_="verdict"))
    parts.append(_pairs(f"{key}-with", "Verified on", facts))
    results = sorted(run["results"], key=lambda r: (r["op"], r["impl_id"]))
    dtypes = list(dict.fromkeys(r["dtype"] for r in run["results"]))
    cells = {(r["op"], r["impl_id"], r["dtype"]): _state(r) for r in results}
    pairs = list(dict.fromkeys((r["op"], r["impl_id"]) for r in results))
    rows: list[tuple[str, ...]] = [
        (op, impl, *(cells.get((op, impl, dtype), Markup("–")) for dtype in dtypes))
        for op, impl in pairs
    ]
    if rows:
        caption = (
            "Support matrix: how many samples of the contract were right, and the worst error as a "
            "share of the tolerance (1 is the limit); with the median time of one call where it "
            "was timed"
        )
        headings = ("op", "implementation", *dtypes)
        parts.append(_table(f"{key}-matrix", caption, headings, rows))
    else:
        parts.append(_el("p", "Nothing was run."))
    if found := list(_findings(results)):
        headings = ("op", "implementation", "status", "dtypes", "samples", "worst", "reason")
        parts.append(_table(f"{key}-findings", "What was not ok", headings, found))
    if run["not_run"]:
        rows = [(r["op"], r["impl_id"], r["reason"]) for r in run["not_run"]]
        headings = ("op", "implementation", "reason")
        parts.append(_table(f"{key}-not-run", "Not run", headings, rows))
    emulated = environment["emulated"]
    return f"emulated: {emulated}" if emulated else device["name"], verdict, parts


def _state(result: Mapping[str, Any]) -> Markup:
    samples = result["samples"]
    total = sum(samples.values())
    bad = samples["wrong"] + samples["raised"]
    more = []
    if result["worst"] is not None:
        more.append(f"worst {result['worst']:.2f}")
    if result["call"] is not None:
        more.append(f"{_us(result['call']['microseconds'])} µs")
    if not total:
        return _el("span", "no samples", class_="more")
    if bad:
        badge = _badge("bad", f"wrong: {bad} of {total}")
    elif not samples["ok"]:
        return _badge("open", "refused")
    else:
        badge = _badge("good", f"ok: {samples['ok']} of {total}")
    if samples["refused"]:
        more.append(f"{samples['refused']} refused")
    return _join(badge, *(_el("span", text, class_="more") for text in more))


def _findings(results: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """One row for each reason of each implementation; what is wrong first."""
    rows: dict[tuple[str, ...], tuple[dict[str, None], dict[str, None], list[float]]] = {}
    for result in results:
        for finding in result["findings"]:
            key = (result["op"], result["impl_id"], finding["status"], finding["reason"])
            dtypes, samples, shares = rows.setdefault(key, ({}, {}, []))
            dtypes[result["dtype"]] = samples[finding["sample"]] = None
            if finding["share"] is not None:
                shares.append(finding["share"])
    order = sorted(rows.items(), key=lambda row: row[0][2] == "refused")
    for (op, impl, status, reason), (dtypes, samples, shares) in order:
        badge = _badge("open" if status == "refused" else "bad", status)
        worst = f"{max(shares):.3g}" if shares else "–"
        yield op, impl, badge, ", ".join(dtypes), "; ".join(samples), worst, reason


# ---------------------------------------------------------------------------------------------
# A coverage


def _coverage_section(key: str, told: Mapping[str, Any], look: Mapping[str, Look]) -> Section:
    shares = (f"{p['name']} {p['reached'].get('yes', 0):.0%}" for p in told["phases"])
    verdict = _badge("open", f"reached: {', '.join(shares)}")
    if any(phase["problem"] for phase in told["phases"]):
        verdict = _badge("bad", "not all of it was seen")
    facts = {
        "model": told["model"],
        "mode": told["mode"],
        "device": told["device"],
        "vLLM's arguments": " ".join(told["arguments"]) or "–",
        "digest": told["digest"],
    }
    parts = [_pairs(f"{key}-of", "Seen in this engine", facts)]
    for number, phase in enumerate(told["phases"], 1):
        parts.append(_el("h3", phase["name"]))
        if phase["problem"]:
            parts.append(_el("p", _badge("bad", "nothing seen"), f" {phase['problem']}"))
        if phase["rows"]:
            headings = ("op", "implementation", "share", "µs", "calls", "reached", "why not")
            caption = (
                f"Whose code takes the time of a step ({phase['name']}), by {phase['of']} that "
                "PyTorch's profiler saw; µs and calls are of one step"
            )
            rows = [_coverage_row(row) for row in phase["rows"]]
            parts.append(_table(f"{key}-{number}", caption, headings, rows))
            parts += [_el("p", line) for line in sums(phase)]
    return f"{told['model']}, {told['mode']}, {told['device']}", verdict, parts


def _coverage_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    kind = {"yes": "good", "no": "bad"}.get(row["reached"], "open")
    return (
        named(row),
        row["impl"] or "–",
        f"{row['share']:.1%}",
        _us(row["us"]),
        f"{row['calls']:.1f}",
        _badge(kind, row["reached"]),
        row["why"] or "–",
    )


SECTIONS: Mapping[str, Callable[[str, Any, Mapping[str, Look]], Section]] = {
    "table": _table_section,
    "verification": _run_section,
    "coverage": _coverage_section,
}
"""Kind of file -> what makes its section."""

# ---------------------------------------------------------------------------------------------
# HTML


def _escaped(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(html.escape(clean(text)))


def _join(*children: str) -> Markup:
    return Markup("".join(map(_escaped, children)))


def _el(name: str, *children: str, **attributes: str) -> Markup:
    """An element; `class_` is class, `aria_label` is aria-label."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(clean(value))}"'
        for key, value in attributes.items()
    )
    end = "\n" if name in BLOCKS else ""
    return Markup(f"<{name}{told}>{_join(*children)}</{name}>{end}")


BLOCKS = ("p", "section", "h1", "h2", "h3", "div", "tr", "caption", "table", "figure")


def _table(
    key: str,
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    class_: str = "plain",
) -> Markup:
    """A table in a container of its own, which scrolls where the window is narrow."""
    head = _el("tr", *(_el("th", text, scope="col") for text in headings))
    lines = [_el("tr", _el("th", _name(row[0]), scope="row"), *map(_cell, row[1:])) for row in rows]
    table = _el(
        "table",
        _el("caption", _el("span", caption), id=f"{key}-caption"),
        _el("thead", head),
        _el("tbody", *lines),
        class_=class_,
    )
    attributes = {"role": "region", "aria_labelledby": f"{key}-caption", "tabindex": "0"}
    return _el("div", table, class_="scroll", **attributes)


def _cell(text: str) -> Markup:
    prose = not isinstance(text, Markup) and len(text) > PROSE
    return _el("td", text, class_="prose") if prose else _el("td", text)


PROSE = 30
"""Characters. A column of longer texts is kept wide enough to be read."""


def _name(text: str) -> Markup:
    """A name that may be broken where its words are."""
    return text if isinstance(text, Markup) else Markup(_escaped(text).replace("_", "_<wbr>"))


def _pairs(key: str, caption: str, facts: Mapping[str, str]) -> Markup:
    return _table(key, caption, ("name", "value"), list(facts.items()))


def _link(key: str, text: str) -> Markup:
    return _el("a", _name(text), href=f"#{key}")


def _badge(kind: str, text: str) -> Markup:
    return _el("span", text, class_=f"badge {kind}")


def _sign(impl: str, look: Mapping[str, Look]) -> Markup:
    """The implementation's marker in its colour."""
    mine = look[impl]
    return _el(
        "span", mine.sign, class_="sign", style=f"color:var(--s{mine.colour})", aria_hidden="true"
    )


def _named(impl: str, look: Mapping[str, Look]) -> Markup:
    return _join(_sign(impl, look), Markup("&nbsp;"), impl)


def _marks(impls: Iterable[str], look: Mapping[str, Look]) -> Markup:
    told = [_el("span", _named(impl, look), class_="mark") for impl in impls]
    return _join(
        *told,
        _el("span", "○ what serves", class_="mark"),
        _el("span", "× rejected", class_="mark"),
    )


def _us(value: float) -> str:
    """Three digits that tell something."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"×{ratio:.3f}"
