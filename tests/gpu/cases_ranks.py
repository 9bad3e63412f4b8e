"""Two ranks on two GPUs, over NCCL: one plan, stock's logits, and a wrong kernel off on both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import OPTIONS, VARIANTS, batches, differs, side_by_side
from engine_run import STOCK, EngineFailed, Job, run

__all__ = ["cases"]

PLUGINS = Path(__file__).resolve().parents[1] / "engine" / "plugins"

WRONG_ON_ONE = {
    "RANK_ONE": "wrong",
    "VLLM_FL_PLUGIN_MODULES": "rank_one",
    "VLLM_FL_PER_OP": "silu_and_mul=vendor:rankone|reference",
}


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(variant and mode, what is wrong or empty)."""
    import torch

    if torch.cuda.device_count() < 2:
        print("skipped: two ranks need two GPUs")
        return
    model = str(tiny_model.make(folder, "qwen3"))
    wrong = {
        **WRONG_ON_ONE,
        "PYTHONPATH": os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]),
    }
    with side_by_side() as pool:
        started: dict[str, tuple[Future[Any], Future[Any], str | None]] = {}
        for mode in ("compiled", "eager"):
            options = {**OPTIONS, "tensor_parallel_size": 2}
            job = Job(model, batches(5, 33, 100), eager=mode == "eager", options=options)
            stock = pool.submit(run, job, **STOCK)
            for name, (variables, planned) in VARIANTS.items():
                started[f"{mode}, {name}"] = stock, pool.submit(run, job, **variables), planned
            failing = pool.submit(run, job, **wrong)
            started[f"{mode}, wrong on rank 1"] = stock, failing, "reference.torch"
        for case, (stock, mine, planned) in started.items():
            try:
                problem = differs(stock.result(), mine.result(), planned)
                yield case, problem or disagrees(mine.result(), "wrong on rank 1" in case)
            except EngineFailed as error:
                yield case, f"the engine failed: {error.log[-3000:]}"


def disagrees(result: dict[str, Any], wrong_on_one: bool) -> str:
    """Empty when both ranks have one digest and name what was wrong on one of them."""
    first, second = result["report"]
    if first["digest"] != second["digest"]:
        return f"the digests differ: {first['digest']} and {second['digest']}"
    for report in (first, second) if wrong_on_one else ():
        reason = report["demotions"].get("silu_and_mul", {}).get("vendor.rankone", "")
        if "on rank 1" not in reason:
            return f"rank {report['rank']} does not name rank 1: {report['demotions']}"
    return ""
