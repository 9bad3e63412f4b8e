"""An engine of two ranks on the nodes of a Ray cluster, each of which may lack something.

vLLM's own CPU platform knows no Ray. The CPU stands for hardware that a plugin brings, as in
tests/engine/test_out_of_tree.py; each node has one, which Ray counts as a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from cluster import HOST, Node, cluster
from engine_run import BIND, STOCK, EngineFailed, Job, run

import envs

CORE, REFERENCE = "vllm-fl-core", "vllm-fl-reference"
FOLDERS = (envs.ROOT / "tests/engine/plugins", envs.ROOT / "tests/nodes/plugins")
PLUGINS = {"PYTHONPATH": ":".join(map(str, FOLDERS))}
DEVICE = {"VLLM_FL_PLUGIN_MODULES": "oot_cpu", "VLLM_FL_PLATFORM": "oot_cpu"}
PROMPTS = [[[3, 17, 170, 99, 41, 7, 250, 12]], [[5 * i + 3, 60, 7, 11, 8] for i in range(4)]]
LAYERS, NEW_TOKENS = 2, 6
LIMIT = 280
"""Seconds in which an engine must have answered, or ended."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.make(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def stock(model: str) -> dict[str, Any]:
    """What vLLM without us answers, in one process."""
    return run(replace(job(model), options={"dtype": "float32"}), **STOCK)


@pytest.fixture(scope="session")
def whole() -> envs.Env:
    """What is installed where the engine is: this session's own environment."""
    return envs.Env(Path(sys.prefix), envs.ray())


@pytest.fixture(scope="session")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., envs.Env]:
    """`without(*names)`: an environment with these distributions alone."""

    def make(*names: str) -> envs.Env:
        wheels = envs.wheels(*names) if names else ()
        return envs.thin(envs.ray(), wheels, tmp_path_factory.mktemp("node") / "env")

    return make


def job(model: str, **options: Any) -> Job:
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "dtype": "float32"}
    return Job(model, PROMPTS, new_tokens=NEW_TOKENS, logits=False, options={**two, **options})


def node(env: envs.Env, number: int, **variables: str) -> Node:
    """A node that knows where modules lie, and none of our settings."""
    core = {BIND: str(number)}
    return Node(env, {"NODE": str(number), **core, **PLUGINS, **variables})


def serve(job: Job, *nodes: Node, **variables: str) -> dict[str, Any]:
    """Run the job in an engine over the cluster of these nodes."""
    with cluster(*nodes) as running:
        where = {"RAY_ADDRESS": running.address, "VLLM_HOST_IP": HOST}
        return run(job, timeout=LIMIT, **where, **PLUGINS, **{**DEVICE, **variables})


def fails(job: Job, *nodes: Node, **variables: str) -> str:
    """What an engine printed that did not start, or did not end well."""
    with pytest.raises(EngineFailed) as failure:
        serve(job, *nodes, **variables)
    return failure.value.log
