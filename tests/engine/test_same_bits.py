"""An engine that is told to serve with batch-invariant implementations alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_run import EngineFailed, Job
from engines import IN_ONE_PROCESS, batches, run

pytestmark = pytest.mark.slow

ORDER = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:otherbits|reference"}
REQUIRED = {"VLLM_FL_REQUIRE": "batch_invariant"}


def test_what_rounds_otherwise_in_large_batches_is_rejected_by_name(
    model: Callable[[str], Path], plugin: Callable[..., dict[str, str]]
) -> None:
    job = Job(str(model("qwen3")), batches())
    results = [
        run(job, **IN_ONE_PROCESS, **ORDER, **variables, **plugin("other_bits"))
        for variables in ({}, REQUIRED)
    ]
    free, bound = (result["report"][0] for result in results)
    assert free["ops"]["silu_and_mul"]["impl"] == "vendor.otherbits", "it is right"
    assert bound["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert bound["demotions"] == {}, "and no fault was found in it"
    assert free["digest"] != bound["digest"]
    log = results[1]["log"]
    named = "Implementation 'vendor.otherbits' is rejected for op 'silu_and_mul': VLLM_FL_REQUIRE"
    (line,) = [line for line in log.splitlines() if named in line]
    assert "other bits in a batch of" in line
    assert "VLLM_FL_REQUIRE=batch_invariant: measured; vLLM's own code is not" in log


def test_on_the_cpu_vllms_own_mode_ends_the_start_in_one_line(
    model: Callable[[str], Path],
) -> None:
    with pytest.raises(EngineFailed) as failure:
        run(Job(str(model("qwen3")), batches()), **IN_ONE_PROCESS, VLLM_BATCH_INVARIANT="1")
    last, page = failure.value.log.strip().splitlines()[-2:]
    assert page.startswith("`vllm-fl explain FL")
    assert "VLLM_BATCH_INVARIANT=1: vLLM has no batch-invariant kernels for the CPU" in last
