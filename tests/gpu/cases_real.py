"""A real model on a GPU: an all-stock plan is bitwise equal to stock, others only round."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases_engines
import prose
from engine_run import STOCK, EngineFailed, run

import envs

__all__ = ["cases"]

SMOLLM2 = "SmolLM2-135M-Instruct"

FLAGOS = {"VLLM_FL_PREFER": "flagos"}

PLANS = {
    "shipped": {},
    "reference": {"VLLM_FL_PREFER": "reference"},
    "vendor": {"VLLM_FL_PREFER": "vendor"},
    "flagos": FLAGOS,
    "flagos, attention too": {**FLAGOS, "VLLM_FL_PER_OP": "attention_backend=flagos"},
}


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(mode, plan and measurements; the problem or "")."""
    model = Path(os.environ.get("REAL_MODELS", envs.MODELS)) / SMOLLM2
    if not model.is_dir():
        how = f"python tools/real_models.py {SMOLLM2} {model} FILE.gguf"
        yield SMOLLM2, f"no model at {model}; REAL_MODELS names another folder, or: {how}"
        return
    true = prose.truth(model)
    options = {**cases_engines.OPTIONS, "max_model_len": 1024, "dtype": "bfloat16"}
    with cases_engines.side_by_side() as pool:
        started = {}
        for eager in (False, True):
            job = prose.job(model, eager=eager, **options)
            stock = pool.submit(run, job, **STOCK)
            for plan, variables in PLANS.items():
                started[eager, plan] = stock, pool.submit(run, job, **variables)
        for (eager, plan), (stock, mine) in started.items():
            case = f"{'eager' if eager else 'compiled'}, {plan}"
            try:
                sides = stock.result(), mine.result()
            except EngineFailed as error:
                yield case, f"the engine failed: {error.log[-3000:]}"
                continue
            found = differs(*sides, true, exactly=plan == "shipped" and not eager)
            yield f"{case}: {measured(*sides, true)}", found


def measured(stock: dict[str, Any], mine: dict[str, Any], true: list[float]) -> str:
    """Distance of a plan to stock and to the float32 truth."""
    logps = prose.logps(mine)
    same = sum(a == b for a, b in zip(stock["tokens"], mine["tokens"], strict=True))
    to_stock = prose.distance(logps, prose.logps(stock))
    return (
        f"to stock {to_stock}; to the truth {prose.distance(logps, true)}, and stock "
        f"{prose.distance(prose.logps(stock), true)}; {same} of {len(stock['tokens'])} answers"
    )


def differs(
    stock: dict[str, Any], mine: dict[str, Any], true: list[float], *, exactly: bool
) -> str:
    """The problem of a plan, or "". `true`: the truth's log-probabilities; `exactly`: require
    bitwise equality with stock if no op is ordered for the device."""
    report = mine["report"][0]
    if report["demotions"]:
        return f"taken out: {report['demotions']}"
    if exactly and not report["ordered_for_device"]:
        same = all(stock[key] == mine[key] for key in ("tokens", "logprobs", "answer_leads"))
        return "" if same else "not stock to the last bit"
    return "; ".join(prose.problems(stock, mine, true))
