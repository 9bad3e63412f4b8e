"""A worker on a node of a Ray cluster dies: the engine ends with a message and does not hang."""

from __future__ import annotations

import pytest
from nodes import fails, job, node

import envs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OP = "silu_and_mul"
MORTAL = {
    "VLLM_FL_PLUGIN_MODULES": "oot_cpu,rank_one",
    "VLLM_FL_PER_OP": f"{OP}=vendor:rankone|reference",
}


def dying(model: str, whole: envs.Env, when: str) -> str:
    """The output of an engine with a dying rank 1."""
    return fails(job(model), *(node(whole, n, RANK_ONE=when) for n in (0, 1)), **MORTAL)


def test_a_worker_that_dies_while_it_verifies_ends_the_start(model: str, whole: envs.Env) -> None:
    log = dying(model, whole, "dies")
    assert "one of them is gone" in log or "died" in log
    assert " planned: " not in log


def test_a_worker_that_is_killed_while_it_serves_ends_the_engine(
    model: str, whole: envs.Env
) -> None:
    log = dying(model, whole, "is-killed")
    assert " planned: " in log
    assert "RayWorkerProc rank=[1] died unexpectedly" in log
    assert "EngineDeadError" in log
