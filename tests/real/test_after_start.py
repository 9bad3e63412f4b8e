"""Weights that are loaded again while an engine serves: equal ones give equal answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import BIND, Job, cores
from engines import IN_ONE_PROCESS, REFERENCE, run
from real_engines import GEMMA, LIMIT, PLANS, SMOLLM2, Model, own_core

MIXTURE = "qwen3_moe"
"""A tiny one with random weights: no small real mixture is at hand."""

EXPERTS = {"VLLM_FL_PER_OP": "fused_experts=reference"}

RUNS = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if fast else pytest.mark.slow)
    for fast, case in (
        (True, (SMOLLM2, "shipped", "eager", 1)),
        (False, (SMOLLM2, "reference", "compiled", 1)),
        (False, (GEMMA, "reference", "eager", 2)),
        (False, (GEMMA, "shipped", "eager", 1)),
        (False, (GEMMA, "reference", "compiled", 1)),
        (False, (MIXTURE, "experts", "eager", 1)),
        (False, (MIXTURE, "experts", "compiled", 1)),
        (False, (MIXTURE, "experts", "eager", 2)),
    )
]


@pytest.mark.parametrize(("name", "plan", "mode", "ranks"), RUNS)
def test_a_reload_of_equal_weights_gives_equal_answers(
    name: str,
    plan: str,
    mode: str,
    ranks: int,
    model: Model,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    folder = tiny_model.make(tmp_path, MIXTURE) if name == MIXTURE else model(name)
    batches = [[[(11 * i + 5 * j) % 500 + 3 for j in range(40 + 9 * i)] for i in range(4)]]
    options: dict[str, Any] = {"max_model_len": 512, "tensor_parallel_size": ranks}
    if ranks == 1:
        del options["tensor_parallel_size"]
    job = Job(
        str(folder),
        batches,
        new_tokens=24,
        eager=mode == "eager",
        logits=False,
        options=options,
        updates=[["reload_weights", {}, True], ["vllm_fl_verify", {}, True]],
        midway="reload_weights",
    )
    variables = {**REFERENCE, **EXPERTS} if plan == "experts" else PLANS[plan]
    where = {**IN_ONE_PROCESS, BIND: str(own_core())}
    if ranks > 1:
        where = {BIND: "|".join(map(str, cores()[:ranks])), "OMP_NUM_THREADS": "1"}
    told = run(job, timeout=LIMIT, **where, **variables)
    reloaded, asked = told["updates"]
    midway = told["midway"]
    kept = [_equal(one, told) for one in (reloaded, midway)]
    record_property(
        "seen",
        f"{name} {mode} {plan}, {ranks} ranks: after a reload {kept[0]} answers are the same, "
        f"{kept[1]} that were under way; {asked.get('answers')}",
    )
    assert reloaded == {"answers": [None] * ranks, "tokens": told["tokens"]}
    assert midway == {"answers": [None] * ranks, "tokens": told["tokens"]}
    assert asked["tokens"] == told["tokens"]
    assert told["log"].count("After the weights were updated: ") == 2
    assert all(report["wrong"] == {} for report in told["report"])


def _equal(one: dict[str, Any], other: dict[str, Any]) -> str:
    """How many answers are the same."""
    same = [a == b for a, b in zip(one["tokens"], other["tokens"], strict=True)]
    return f"{sum(same)} of {len(same)}"
