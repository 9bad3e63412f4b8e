"""An engine answers as before after its weights were offloaded, or discarded and reloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases_engines
import tiny_model
from engine_run import STOCK, EngineFailed, Job, run

__all__ = ["cases"]

PLANS = {
    "stock": STOCK,
    "shipped": {},
    "reference": {"VLLM_FL_PREFER": "reference"},
    "flagos": {"VLLM_FL_PREFER": "flagos"},
}

LATE = "After the weights were updated during sleep: "
"""Start of the log line if verification had to wait for the KV cache."""

UPDATES: list[list[Any]] = [
    ["reload_weights", {}, True],
    ["LLM.sleep", {"level": 1}, False],
    ["LLM.wake_up", {}, True],
    ["LLM.sleep", {"level": 2}, False],
    ["LLM.wake_up", {"tags": ["weights"]}, False],
    ["reload_weights", {}, False],
    ["LLM.wake_up", {"tags": ["kv_cache"]}, True],
]


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(family, mode and plan; the problem or "")."""
    options = {**cases_engines.OPTIONS, "enable_sleep_mode": True}
    with cases_engines.side_by_side() as pool:
        started = {}
        for family in ("qwen3", "gemma3", "qwen3_moe"):
            model = str(tiny_model.make(folder, family))
            for eager in (False, True):
                job = Job(
                    model,
                    cases_engines.batches(5, 33, 100),
                    eager=eager,
                    logits=False,
                    options=options,
                    updates=UPDATES,
                )
                for plan, variables in PLANS.items():
                    case = f"{family}, {'eager' if eager else 'compiled'}, {plan}"
                    started[case] = pool.submit(run, job, **variables)
        for case, mine in started.items():
            try:
                yield case, differs(mine.result(), is_ours=not case.endswith("stock"))
            except EngineFailed as error:
                yield case, f"the engine failed: {error.log[-3000:]}"


def differs(mine: dict[str, Any], *, is_ours: bool) -> str:
    """Empty if every step succeeds and every answer is unchanged."""
    for (method, given, runs), update in zip(UPDATES, mine["updates"], strict=True):
        if "error" in update:
            return f"{method} {given}: {update['error']}"
        if runs and update["tokens"] != mine["tokens"]:
            same = sum(a == b for a, b in zip(update["tokens"], mine["tokens"], strict=True))
            return f"after {method} {given} {same} of {len(mine['tokens'])} answers are the same"
    if is_ours and any(entry["impl"] != "stock" for entry in mine["report"][0]["ops"].values()):
        if mine["report"][0]["wrong"]:
            return f"found wrong: {mine['report'][0]['wrong']}"
        if mine["log"].count(LATE) != 1:
            return "no look at the plan when all was awake"
    return ""
