"""`vllm-fl ops`: every op, with what is selected for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..dispatch import get_default_manager
from ..dispatch.manager import OpManager
from ..dispatch.resolver import STOCK, Stock, Trace
from ..engine.plan import PlanEntry
from ..plugins.communicator import NAMED_CLASSES
from ..plugins.registry import Owner
from ..plugins.reserved import why_absent
from ._engine import WHERE, asked_of, entry_of, takes_engine
from ._show import answer, print_table, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For whom: a script, an engine of any model, or one of this model."""
    takes_engine(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when an op that a backend brings has no implementation that may run, or none does."""
    if arguments.model is None and arguments.mode is None:
        arguments.mode = "compiled"
    engines = asked_of(arguments)
    manager = get_default_manager()
    snapshot = manager.registry.snapshot()
    of_vllm = {*NAMED_CLASSES, *snapshot.layers}  # where vLLM's own is the last
    entries: list[tuple[str, PlanEntry | None]] = [
        (op, entry_of(engine, op)) for engine in engines for op in snapshot.ops
    ] or [(op, PlanEntry(op, manager.rows(op, engine=op in of_vllm))) for op in snapshot.ops]
    aside = engines[0].aside if engines else ""
    facts = {
        "mode": engines[0].facts.mode if engines else "script",
        "aside": aside,
        "unasked": engines[0].unasked if engines else "",
        "ops": [_told(manager, op, entry) for op, entry in entries if entry or aside],
    }
    answer(facts, _show, as_json=arguments.json)
    brought = [op for op in facts["ops"] if op["candidates"]]
    found = aside or (brought and all(op["selected"] for op in brought))
    return 0 if found else 1


def _told(manager: OpManager, op: str, entry: PlanEntry | None) -> dict[str, Any]:
    """One op as JSON data; without an entry vLLM runs it alone."""
    if entry is None:
        return {"op": op, "selected": STOCK.impl_id, "by_size": False, "note": "", "candidates": []}
    *smaller, (_, trace) = entry.rows
    selected = trace.selected.impl_id if trace.selected else None
    return {
        "op": op,
        "selected": entry.left_to.impl_id if entry.note else selected,
        "by_size": bool(smaller) and not entry.note,
        "note": entry.note,
        "candidates": as_rows(manager, trace),
    }


def _show(facts: Mapping[str, Any]) -> None:
    ops, manager = facts["ops"], get_default_manager()
    say(f"{WHERE[facts['mode']].capitalize()}:")
    for why in filter(None, (facts["aside"], facts["unasked"])):
        say(f"{why}.")
    print_table(
        ["op", "selected", "eligible", "rejected"],
        [(op["op"], _selected(op), _ids(op, "eligible"), _ids(op, "rejected")) for op in ops],
    )
    if any(op["by_size"] for op in ops):
        say("(by size): this is what the largest calls run; smaller ones have other orders.")
    if not manager.registry.snapshot().contracts:
        plugins = manager.startup.plugins if manager.startup else ()
        say(f"No op has a contract here: {why_absent(plugins)}.")
    say("`vllm-fl explain OP` shows why.")


def as_rows(manager: OpManager, trace: Trace) -> list[dict[str, Any]]:
    """Every candidate of a trace, with who brought it."""
    owners = manager.registry.snapshot().owners
    rows = []
    for candidate in trace.candidates:
        impl = candidate.impl
        owner = owners.get((trace.op, impl.impl_id), Owner("vllm"))
        rows.append(
            {
                "impl_id": impl.impl_id,
                "kind": impl.token if isinstance(impl, Stock) else impl.kind.value,
                "vendor": impl.vendor,
                "priority": impl.priority,
                "distribution": owner.distribution,
                "version": owner.version,
                "status": candidate.status,
                "reason": candidate.reason,
            }
        )
    return rows


def _selected(op: dict[str, Any]) -> str | None:
    selected: str | None = op["selected"]
    return f"{selected or '-'} (by size)" if op["by_size"] else selected


def _ids(op: dict[str, Any], status: str) -> str:
    rows = op["candidates"]
    return ", ".join(row["impl_id"] for row in rows if row["status"] == status) or "-"
