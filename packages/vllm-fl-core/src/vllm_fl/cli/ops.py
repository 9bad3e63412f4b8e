"""`vllm-fl ops`: every op, with what is selected for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..dispatch import get_default_manager
from ..dispatch.manager import OpManager
from ..dispatch.resolver import Stock, Trace
from ..plugins.communicator import NAMED_CLASSES
from ..plugins.registry import Owner
from ..plugins.reserved import why_absent
from ._show import answer, print_table, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when an op that a backend brings has no implementation that may run, or none does."""
    manager = get_default_manager()
    snapshot = manager.registry.snapshot()
    of_vllm = {*NAMED_CLASSES, *snapshot.layers}  # where vLLM's own is the last
    ops: list[dict[str, Any]] = []
    for name in snapshot.ops:
        trace = manager.trace(name, engine=name in of_vllm)
        selected = trace.selected.impl_id if trace.selected else None
        by_size = bool(manager.policy.ceilings(name))
        ops.append(
            {
                "op": name,
                "selected": selected,
                "by_size": by_size,
                "candidates": as_rows(manager, trace),
            }
        )
    answer({"ops": ops}, _show, as_json=arguments.json)
    brought = [op for op in ops if op["candidates"]]
    return 0 if brought and all(op["selected"] for op in brought) else 1


def _show(facts: Mapping[str, Any]) -> None:
    ops, manager = facts["ops"], get_default_manager()
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
