"""`vllm-fl plan --save`: writes a lock file of an engine, for VLLM_FL_LOCK.

It starts an engine as `vllm serve` does, on the machine that will serve, because verification
decides the plan.
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

from ._engines import check_model, engine_startup, running_engine
from ._options import draft_of
from ._show import UsageError, print_answer, say

DRAFT: dict[str, Any] = {"facts": None, "result": None, "seed": None}
"""An empty lock file. An engine with it compares no facts, but records its own facts."""


def save(arguments: argparse.Namespace) -> int:
    """Start the engine, and write its lock file to `arguments.save`."""
    model = check_model("--save", arguments.model)
    engine_startup()
    with draft_of(arguments.save, "--save") as file, tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft.lock"
        draft.write_text(text_of(DRAFT), encoding="utf-8")
        environment = {**os.environ, Settings.lock.variable: str(draft)}
        with running_engine(
            "for the lock file",
            model,
            {},
            environment,
            as_served=True,
            arguments=arguments.more,
        ) as engine:
            first, *others = engine.report["ranks"]
        _check_alike(first, others)
        file.put(text_of(first).encode(), lasting=True)
    facts = {"file": arguments.save, "ranks": 1 + len(others), **first["result"]}
    print_answer(facts, _show, as_json=arguments.json)
    return 0


def text_of(content: Mapping[str, Any]) -> str:
    marked = {MARK: VERSION, **content}
    return json.dumps(marked, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _check_alike(first: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Raise UsageError if facts differ between ranks, as no startup could match the lock file."""
    from ..operate.locking import lock_differences  # imports vLLM, which verbs import on demand

    lock = Locked("", first["facts"], first["result"], first["seed"])
    for rank, other in enumerate(others, 1):
        if lines := lock_differences(lock, other["facts"]):
            joined = "; ".join(lines)
            raise UsageError(f"a lock file needs equal ranks, but rank {rank} differs: {joined}")


def _show(facts: Mapping[str, Any]) -> None:
    for op, of_op in facts["out"].items():
        for impl, why in of_op.items():
            say(f"{op}={impl} is disabled: {why}")
    say(f"{facts['file']} has {len(facts['ops'])} ops, digest {facts['digest']}.")
    named = f"{Settings.lock.variable}={facts['file']}"
    say(f"Serve with {named}: an engine that differs lists the differences and fails to start.")
