"""A shadow over a real model's tensors: every call of every step, and no false alarm."""

from __future__ import annotations

import pytest
from real_engines import GEMMA, SMOLLM2, Scored

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("plan", ["shipped", "vendor", "reference"])
@pytest.mark.parametrize("name", [SMOLLM2, GEMMA])
def test_right_kernels_raise_no_alarm(name: str, plan: str, scored: Scored) -> None:
    plain, ours = scored(name, plan), scored(name, plan, label="shadow", VLLM_FL_SHADOW="1")
    (report,) = ours["report"]
    shadow = report["shadow"]
    assert shadow["sampled"] == shadow["steps"] > ours["steps"]  # those of the texts, too
    called = {op for op, of_op in report["calls"].items() if sum(of_op.values())}
    assert called and called <= set(shadow["compared"])
    tallies = [
        (op, impl, tally)
        for op, of_op in shadow["compared"].items()
        for impl, by in of_op.items()
        for tally in by.values()
    ]
    assert [found for found in tallies if found[2]["wrong"]] == []
    assert "Shadow: implementation" not in ours["log"]
    assert (ours["tokens"], ours["logprobs"]) == (plain["tokens"], plain["logprobs"])
