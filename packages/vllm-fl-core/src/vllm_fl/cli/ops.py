"""`vllm-fl ops`: every op, with what is selected for it."""

from __future__ import annotations

import argparse
from typing import Any

from ..dispatch import get_default_manager
from ..plugins.communicator import NAMED_CLASSES
from ..plugins.reserved import why_absent
from ._candidates import as_rows
from ._show import print_json, print_table, say


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
    if arguments.json:
        print_json(ops=ops)
    else:
        print_table(
            ["op", "selected", "eligible", "rejected"],
            [(op["op"], _selected(op), _ids(op, "eligible"), _ids(op, "rejected")) for op in ops],
        )
        if any(op["by_size"] for op in ops):
            say("(by size): this is what the largest calls run; smaller ones have other orders.")
        if not snapshot.contracts:
            plugins = manager.startup.plugins if manager.startup else ()
            say(f"No op has a contract here: {why_absent(plugins)}.")
        say("`vllm-fl explain OP` shows why.")
    brought = [op for op in ops if op["candidates"]]
    return 0 if brought and all(op["selected"] for op in brought) else 1


def _selected(op: dict[str, Any]) -> str | None:
    selected: str | None = op["selected"]
    return f"{selected or '-'} (by size)" if op["by_size"] else selected


def _ids(op: dict[str, Any], status: str) -> str:
    rows = op["candidates"]
    return ", ".join(row["impl_id"] for row in rows if row["status"] == status) or "-"
