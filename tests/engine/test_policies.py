"""Policies in an engine: a typo, strict mode, and batch-invariant implementations."""

from __future__ import annotations

import pytest
from engine_run import EngineFailed, Job
from engines import IN_ONE_PROCESS, Model, Plugin, batches, run

pytestmark = pytest.mark.slow

SLIP = {"VLLM_FL_PER_OP": "silu_and_mul=impl:vendor.cup"}
MEANT = "'impl:vendor.cup'. Did you mean 'impl:vendor.cpu'?"


def test_a_slip_is_in_the_engines_log_once(model: Model) -> None:
    ours = run(Job(str(model("qwen3")), batches()), **SLIP)
    assert ours["report"][0]["ops"]["silu_and_mul"]["impl"] == "stock"
    assert ours["log"].count(MEANT) == 1
    assert "No implementation in the order of silu_and_mul can run" in ours["log"]


def test_strict_and_an_absent_backend_end_the_start(model: Model) -> None:
    with pytest.raises(EngineFailed) as failure:
        run(Job(str(model("qwen3")), batches()), VLLM_FL_STRICT="1", **SLIP)
    log = failure.value.log
    assert "vllm-fl: engine startup failed" in log
    assert "strict mode: no implementation in the order of op 'silu_and_mul'" in log
    assert MEANT in log


def test_strict_mode_raises_a_refusal_by_name(model: Model, plugin: Plugin) -> None:
    order = {"VLLM_FL_PER_OP": "rms_norm=impl:vendor.late", "VLLM_FL_STRICT": "1"}
    with pytest.raises(EngineFailed) as failure:
        run(Job(str(model("qwen3")), batches()), **plugin("late_refusal"), **order)
    log = failure.value.log
    assert " planned: " in log, "it starts, and refuses its first request"
    assert "'vendor.late' does not support a call of op 'rms_norm': NotImplementedError" in log


ORDER = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:otherbits|reference"}
REQUIRED = {"VLLM_FL_REQUIRE": "batch_invariant"}


def test_what_rounds_otherwise_in_large_batches_is_rejected_by_name(
    model: Model, plugin: Plugin
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
    assert "different bits in batches of" in line
    measured = "VLLM_FL_REQUIRE=batch_invariant: measured; of vLLM's code, only layers are"
    assert measured in bound["remarks"]
