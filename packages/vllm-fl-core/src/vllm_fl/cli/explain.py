"""`vllm-fl explain`: every candidate of one op, and why it was selected or rejected."""

from __future__ import annotations

import argparse

from ..dispatch import get_default_manager
from ..dispatch.contracts import contracts
from ._candidates import as_rows
from ._show import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The op, and the engine's mode."""
    parser.add_argument("op", metavar="OP", help="the op, as `vllm-fl ops` names it")
    parser.add_argument(
        "--mode",
        choices=("script", "eager", "compiled"),
        default="script",
        help="who calls it: a script (call_op), or an engine in eager or compiled mode, where "
        "vLLM's own path (stock) is a candidate too",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when nothing may run."""
    manager = get_default_manager()
    engine = arguments.mode != "script"
    trace = manager.trace(
        arguments.op, mode="compiled" if arguments.mode == "compiled" else "eager", engine=engine
    )
    rows = as_rows(manager, trace)
    selected = trace.selected.impl_id if trace.selected else None
    if arguments.json:
        print_json(op=trace.op, mode=arguments.mode, selected=selected, candidates=rows)
    else:
        spec = contracts().get(trace.op)
        print(f"{trace.op}{spec.signature if spec else ''}")
        print(f"order ({arguments.mode}): {' | '.join(map(str, trace.order))}")
        print_table(
            ["implementation", "kind", "priority", "distribution", "status", "reason"],
            [
                (
                    r["impl_id"],
                    r["kind"],
                    r["priority"],
                    f"{r['distribution']} {r['version']}" if r["distribution"] else None,
                    r["status"],
                    r["reason"],
                )
                for r in rows
            ],
        )
        if selected is None:
            print(
                "Nothing may run. Install a backend (pip install vllm-fl-reference), or admit "
                "one of the rejected ones."
            )
    return 0 if selected else 1
