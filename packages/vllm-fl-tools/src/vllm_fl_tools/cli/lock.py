"""`vllm-fl lock`: writes down all that an engine runs with, so that a start that differs says so.

An engine is started as `vllm serve` starts it, on the machine that will serve: a plan is known when
it is verified.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_fl.settings.lock import MARK, VERSION, Locked
from vllm_fl.settings.schema import Settings

from ._engines import check_model, planned, running, takes_model
from ._options import ReportFile
from ._show import UsageError, answer, say

FILE = "vllm-fl.lock"

DRAFT: dict[str, Any] = {"facts": {}, "result": {}, "seed": None}
"""A lock that nothing differs from: under it a start notes what it is made of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which engine, and where to."""
    takes_model(parser)
    parser.add_argument(
        "--out", metavar="FILE", default=FILE, help=f"where to write it; default: {FILE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Start the engine, let it say what it is, and write that."""
    check_model(arguments.model)
    planned()
    lock, mode = Settings.lock.variable, Settings.lock_mode.variable
    with ReportFile(arguments.out, "--out") as file, tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / FILE
        draft.write_text(text_of({MARK: VERSION, **DRAFT}), encoding="utf-8")
        environment = {name: text for name, text in os.environ.items() if name != mode}
        environment[lock] = str(draft)
        with running(
            "to be locked",
            arguments.model,
            {},
            environment,
            as_served=True,
            arguments=arguments.more,
        ) as engine:
            first, *others = engine.report["ranks"]
        _check_alike(first, others)
        file.write(text_of({MARK: VERSION, **first}))
    facts = {"file": arguments.out, "ranks": 1 + len(others), **first["result"]}
    answer(facts, _show, as_json=arguments.json)
    return 0


def text_of(value: Any, line_break: str = "\n") -> str:
    """JSON in which keys are sorted, and a list of numbers or names has one line."""
    inner = f"{line_break} "
    if isinstance(value, dict) and value:
        rows = [f"{json.dumps(key)}: {text_of(value[key], inner)}" for key in sorted(value)]
        told = f"{{{inner}{f',{inner}'.join(rows)}{line_break}}}"
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        rows = [text_of(each, inner) for each in value]
        told = f"[{inner}{f',{inner}'.join(rows)}{line_break}]"
    else:
        told = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return told if line_break != "\n" else f"{told}\n"


def _check_alike(first: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Raise UsageError where ranks are made of other things: no start would agree with the lock."""
    from ..operate.locking import differences  # imports vLLM, which verbs do on demand

    lock = Locked("", first["facts"], first["result"], first["seed"])
    for rank, other in enumerate(others, 1):
        if lines := differences(lock, other["facts"]):
            told = "; ".join(lines)
            raise UsageError(f"one lock holds for all ranks, and rank {rank} differs: {told}")


def _show(facts: Mapping[str, Any]) -> None:
    for op, of_op in facts["out"].items():
        for impl, why in of_op.items():
            say(f"{op}={impl} is out: {why}")
    say(f"{facts['file']} has {len(facts['ops'])} ops, digest {facts['digest']}.")
    named = f"{Settings.lock.variable}={facts['file']}"
    say(f"Serve with {named}: a start that differs says so, and ends.")
