"""What of an op vLLM computes past us: told of every op, in one printable line each."""

from __future__ import annotations

from vllm_fl.contracts import contracts
from vllm_fl.integration.bypasses import BYPASSES
from vllm_fl.plugins.attention import ATTENTION


def test_every_op_says_what_runs_past_it() -> None:
    assert set(BYPASSES) == {*contracts(), ATTENTION}
    for told in BYPASSES.values():
        assert told and len(set(told)) == len(told)
        assert all(line.isprintable() and not line.endswith(".") for line in told)
