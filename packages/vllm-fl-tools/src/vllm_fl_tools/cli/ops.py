"""`vllm-fl ops`: every op, with what is selected for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.communicator import NAMED_CLASSES
from vllm_fl.plugins.reserved import ops_missing

from ._engine import WHERE, asked_of, entry_of, takes_engine
from ._show import answer, print_table, say
from ._views import script_view, view_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For whom: a script, an engine of any model, or one of this model."""
    takes_engine(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when an op that a backend brings has no implementation that may run, or none does."""
    if arguments.model is None and arguments.mode is None:
        arguments.mode = "compiled"
    engine = next(iter(asked_of(arguments)), None)
    manager = get_default_manager()
    snapshot, settings = manager.registry.snapshot(), manager.settings
    assert settings is not None  # the default manager finds its own plugins
    of_vllm = {*NAMED_CLASSES, *snapshot.layers}  # no script calls them
    if engine is None:
        ops = (op for op in snapshot.ops if op not in of_vllm)
        views = {op: script_view(manager, op, settings) for op in ops}
    else:
        ops = (op for op in snapshot.ops if engine.aside or entry_of(engine, op))
        views = {op: view_of(manager, op, engine) for op in ops}
    facts: dict[str, Any] = {
        "mode": engine.facts.mode if engine else "script",
        "aside": engine.aside if engine else "",
        "unasked": engine.unasked if engine else "",
        "ops": [
            {
                "op": op,
                "selected": view["selected"],
                "by_size": bool(view["rows"]),
                "note": view["note"],
                "candidates": view["candidates"],
            }
            for op, view in views.items()
        ],
    }
    answer(facts, _show, as_json=arguments.json)
    brought = [op for op in facts["ops"] if op["candidates"]]
    return 0 if facts["aside"] or (brought and all(op["selected"] for op in brought)) else 1


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
        say(f"No op has a contract here: {ops_missing(plugins)}.")
    say("`vllm-fl explain OP` shows why.")


def _selected(op: dict[str, Any]) -> str | None:
    selected: str | None = op["selected"]
    return f"{selected or '-'} (by size)" if op["by_size"] else selected


def _ids(op: dict[str, Any], status: str) -> str:
    rows = op["candidates"]
    return ", ".join(row["impl_id"] for row in rows if row["status"] == status) or "-"
