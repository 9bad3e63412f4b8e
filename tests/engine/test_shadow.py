"""Shadow checks in real engines: they report drift and change no result."""

from __future__ import annotations

from typing import Any

import pytest
from engine_run import Job
from engines import IN_ONE_PROCESS, REFERENCE, Model, Plugin, Runner, batches, difference, run

pytestmark = pytest.mark.slow

PLANNED = ("rms_norm", "rotary_embedding", "silu_and_mul")


def tallies(report: dict[str, Any], op: str) -> dict[str, list[dict[str, Any]]]:
    """Implementation -> its tallies, one for each bucket."""
    return {impl_id: [*by.values()] for impl_id, by in report["shadow"]["compared"][op].items()}


def test_what_begins_to_be_wrong_while_it_serves_is_named(model: Model, plugin: Plugin) -> None:
    ours = run(
        Job(str(model("qwen3")), batches(), logits=False),
        **plugin("drifting"),
        **IN_ONE_PROCESS,
        **REFERENCE,
        VLLM_FL_PER_OP="silu_and_mul=vendor:drifting",
        VLLM_FL_SHADOW="0.5",
    )
    (report,) = ours["report"]
    assert report["demotions"] == {}, "the start sees nothing of it"
    shadow = report["shadow"]
    assert 0 < shadow["sampled"] < shadow["steps"] == ours["steps"]
    found = tallies(report, "silu_and_mul")["vendor.drifting"]
    wrong, calls = (sum(tally[field] for tally in found) for field in ("wrong", "calls"))
    assert 0 < wrong < calls
    for op in set(shadow["compared"]) - {"silu_and_mul"}:
        ((of_op),) = tallies(report, op).values()
        assert not any(tally["wrong"] for tally in of_op), (op, of_op)
    assert "implementation 'vendor.drifting' of op 'silu_and_mul' is incorrect" in ours["log"]


def test_a_compiled_engine_runs_sampled_steps_uncompiled(engine: Runner, model: Model) -> None:
    plain = engine("qwen3", "reference", eager=False)
    job = Job(str(model("qwen3")), batches(), eager=False)
    ours = run(job, VLLM_FL_SHADOW="0.5", **REFERENCE)
    (report,), (before,) = ours["report"], plain["report"]
    assert report["digest"] == before["digest"]
    shadow = report["shadow"]
    assert 0 < shadow["sampled"] < shadow["steps"] == ours["steps"]
    assert set(PLANNED) <= set(shadow["compared"]), shadow
    for op in shadow["compared"]:
        ((found),) = tallies(report, op).values()
        assert sum(tally["calls"] for tally in found) >= shadow["sampled"], op
        assert not any(tally["wrong"] for tally in found), (op, found)
    assert difference(plain, ours) < 0.05
