"""Two ranks on the CPU, of which one dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_run import EngineFailed, Job
from engines import batches, run

pytestmark = pytest.mark.slow

TWO_RANKS = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_FL_PER_OP": "silu_and_mul=vendor:rankone|reference",
}


def job(model: Callable[[str], Path]) -> Job:
    return Job(str(model("qwen3")), batches(), options={"tensor_parallel_size": 2})


def test_a_rank_that_dies_while_it_verifies_ends_the_start(
    model: Callable[[str], Path], plugin: Callable[..., dict[str, str]]
) -> None:
    start = time.monotonic()
    with pytest.raises(EngineFailed) as failure:
        run(job(model), RANK_ONE="dies", **TWO_RANKS, **plugin("rank_one"))
    # No timing of ours: a hang would last vLLM's own half hour, and the run's limit ends it first.
    assert time.monotonic() - start < 600
    assert "one of them is gone" in failure.value.log or "died" in failure.value.log
