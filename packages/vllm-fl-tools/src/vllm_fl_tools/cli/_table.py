"""The table that the settings name, as the verbs show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_fl.settings.schema import Settings
from vllm_fl.settings.table import DEFAULT, Figure, Pinned, TunedOp

from ..operate.described import Described
from ._show import print_table, say

FIGURES = [
    "tokens",
    "implementation",
    "µs",
    "quartiles",
    "n",
    "x default",
    "of bandwidth",
    "verdict",
]


def _summary(pinned: Pinned) -> str:
    """What the table was measured for, one line."""
    table = pinned.table
    verdict = table.accepted
    if verdict is None:
        judged = "never accepted"
    else:
        judged = f"{'' if verdict.accepted else 'not '}accepted {verdict.date[:10]}"
        judged += f" ({verdict.reason})" * (not verdict.accepted)
    model = table.model or "a model of its sizes"
    return f"T{pinned.origin[1:]} for {model} ({table.mode}, {table.dtype}), {judged}"


def as_json(
    settings: Settings, op: str = "", engines: Sequence[Described] = ()
) -> dict[str, Any] | None:
    """The table as JSON data: its rows, and with `op` that op's rows, figures and why they idle in
    these engines."""
    pinned = settings.pinned
    if pinned is None:
        return None
    table = pinned.table
    content: dict[str, Any] = {
        "summary": _summary(pinned),
        "file": pinned.file,
        "digest": pinned.digest,
        "model": table.model,
        "mode": table.mode,
        "dtype": table.dtype,
        "date": table.date,
        "identity": dict(table.identity),
        "accepted": table.accepted is not None and table.accepted.accepted,
    }
    if not op:
        idle = [each for each in table.ops if settings.policy.names(each)]
        rows = {each: _rows(tuned) for each, tuned in table.ops.items()}
        return content | {"rows": rows, "idle": idle}
    tuned = table.ops.get(op)
    if tuned is None:
        return content | {"rows": [], "figures": [], "obstacle": "it does not name the op"}
    acts = next((e.table for e in engines if e.facts.mode == table.mode), engines[0].table)
    why = acts.reason or acts.left_out.get(op)
    if not why and settings.policy.names(op):
        why = "a list of yours orders the op"
    figures = [_figure(tuned, figure) for figure in tuned.figures]
    return content | {"rows": _rows(tuned), "figures": figures, "obstacle": why or None}


def say_figures(told: dict[str, Any]) -> None:
    """What the table says of one op, as `as_json` tells it."""
    say(f"\n{told['summary']}.")
    if told["obstacle"]:
        say(f"It does not order this op here: {told['obstacle']}.")
    elif all(row["impl"] == DEFAULT for row in told["rows"]):
        say("Nobody beat the default: it leaves the order of this op as it is.")
    else:
        say("It orders this op in such engines, for a model of its sizes.")
    if told["rows"]:
        rows = [f"up to {row['up_to']} tokens {row['impl']}" for row in told["rows"]]
        say(f"Rows: {', '.join(rows)}; beyond them the default.")
    if told["figures"]:
        print_table(FIGURES, [_cells(figure) for figure in told["figures"]])


def _rows(tuned: TunedOp) -> list[dict[str, Any]]:
    return [{"up_to": row.up_to, "impl": row.impl} for row in tuned.rows]


def _figure(tuned: TunedOp, figure: Figure) -> dict[str, Any]:
    row = next((row for row in tuned.rows if figure.tokens <= row.up_to), None)
    chosen = DEFAULT if row is None else row.impl
    serves = tuned.default if chosen == DEFAULT else chosen
    return {**vars(figure), "serves": figure.impl == serves}


def _cells(figure: dict[str, Any]) -> list[object]:
    timed = figure["us"] is not None
    verdict = figure["rejected"] or ("serves" if figure["serves"] else None)
    return [
        figure["tokens"],
        figure["impl"],
        f"{figure['us']:.2f}" if timed else None,
        f"{figure['low']:.2f}-{figure['high']:.2f}" if timed and figure["low"] else None,
        figure["n"] or None,
        None if figure["ratio"] is None else f"{figure['ratio']:.3f}",
        None if figure["copy_share"] is None else f"{figure['copy_share']:.0%}",
        verdict,
    ]
