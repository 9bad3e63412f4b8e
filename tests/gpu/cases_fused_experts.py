"""A plan that replaces fused experts, in engines on a GPU, against stock's logits. Every token of
the tiny model uses all experts, so the last bit of a score cannot select another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import OPTIONS, batches, close, side_by_side
from engine_run import STOCK, EngineFailed, Job, run

__all__ = ["cases"]

IMPLS = {"flagos": "default.flagos", "reference": "reference.torch"}
"""Selector -> the implementation of `fused_experts` that must run."""


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(implementation and mode, the problem or "")."""
    model = str(tiny_model.make(folder, "qwen3_moe", num_experts_per_tok=8))
    with side_by_side() as pool:
        started = {}
        for eager in (True, False):
            job = Job(model, batches(5, 33, 100), eager=eager, options=OPTIONS)
            stock = pool.submit(run, job, **STOCK)
            for token, impl in IMPLS.items():
                only = {"VLLM_FL_PER_OP": f"fused_experts={token}", "VLLM_FL_DISPATCH_DEBUG": "1"}
                mode = "eager" if eager else "compiled"
                started[impl, mode] = stock, pool.submit(run, job, **only)
        for (impl, mode), (stock, mine) in started.items():
            try:
                problem = _replaces(impl, stock.result(), mine.result())
            except EngineFailed as error:
                problem = f"the engine failed: {error.log[-3000:]}"
            yield f"fused_experts={impl}, {mode}", problem


def _replaces(impl: str, stock: dict[str, Any], mine: dict[str, Any]) -> str:
    """Empty if that implementation ran without fallbacks and the logits equal stock's logits."""
    report = mine["report"][0]
    if report["ops"]["fused_experts"]["impl"] != impl or report["demotions"]:
        return f"planned {report['ops']['fused_experts']}, demotions {report['demotions']}"
    calls = report["calls"].get("fused_experts", {})
    if not calls.get(impl) or report["fallbacks"].get("fused_experts"):
        return f"calls {calls}, fallbacks {report['fallbacks']}"
    return close(stock, mine)
