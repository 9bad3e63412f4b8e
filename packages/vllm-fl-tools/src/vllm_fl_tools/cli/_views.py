"""What is said of an op's candidates, as JSON data: in an engine, and for a script."""

from __future__ import annotations

from typing import Any

from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.resolver import STOCK, Stock, Trace
from vllm_fl.plugins.plugin import Owner
from vllm_fl.settings.policy import DEFAULT, Mode, OpOrder, Rows
from vllm_fl.settings.schema import Settings
from vllm_fl.settings.values import ORDER_PREFIX

from ..operate.described import Described
from ._engine import entry_of


def script_view(manager: OpManager, op: str, settings: Settings) -> dict[str, Any]:
    """What a script gets, as JSON data: it may have a policy of its own in force."""
    rows = manager.rows(op, without_layer=True)
    return {"mode": "script", "note": "", **_view(manager, op, rows, settings, "eager")}


def view_of(manager: OpManager, op: str, engine: Described) -> dict[str, Any]:
    """What an engine gets, as JSON data."""
    entry, facts = entry_of(engine, op), engine.facts.ordered
    note = entry.note if entry else "this engine has none of it"
    told = _view(manager, op, entry.rows if entry else (), facts.settings, facts.mode)
    if engine.aside:
        note, told["selected"] = f"vLLM runs without vllm-fl: {engine.aside}", STOCK.impl_id
    elif entry and note:
        told |= {"selected": entry.left_to.impl_id, "rows": []}
    return {"mode": facts.mode, "note": note, **told}


def _view(
    manager: OpManager, op: str, rows: Rows[Trace], settings: Settings, mode: Mode
) -> dict[str, Any]:
    """The traces of an op, by size, as JSON data."""

    def told(trace: Trace) -> dict[str, Any]:
        return {
            "order": [str(token) for token in trace.order],
            "selected": trace.selected.impl_id if trace.selected else None,
            "candidates": _as_rows(manager, trace),
        }

    *smaller, (_, rest) = rows or ((None, Trace(op, mode, (), ())),)
    return {
        "origin": _origin(settings, op, mode),
        **told(rest),
        "rows": [{"up_to": ceiling, **told(row)} for ceiling, row in smaller],
    }


def _origin(settings: Settings, op: str, mode: Mode) -> str:
    """Where the order comes from: the op's own list, or the preference."""
    for name in (op, DEFAULT):
        listed = settings.get(f"{ORDER_PREFIX}{name}")
        order = listed and listed.value
        if listed and isinstance(order, OpOrder) and order.rows(mode):
            return f"{listed.key}, {listed.origin}"
    prefer = settings["prefer"]
    return f"prefer={prefer.value}, {prefer.origin}"


def _as_rows(manager: OpManager, trace: Trace) -> list[dict[str, Any]]:
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
