"""An engine of two ranks on the nodes of a Ray cluster, with packages missing on some nodes. vLLM's
CPU platform does not support Ray, so the CPU is a plugin's device, as in
tests/engine/test_out_of_tree.py; each node has one, counted by Ray as a GPU."""

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

CORE, OPS, VERIFY = "vllm-fl-core", "vllm-fl-ops", "vllm-fl-verify"
REFERENCE = "vllm-fl-reference"
FOLDERS = (envs.ROOT / "tests/engine/plugins", envs.ROOT / "tests/nodes/plugins")
PLUGINS = {"PYTHONPATH": ":".join(map(str, FOLDERS))}
DEVICE = {"VLLM_FL_PLUGIN_MODULES": "oot_cpu", "VLLM_FL_PLATFORM": "oot_cpu"}
PROMPTS = [[[3, 17, 170, 99, 41, 7, 250, 12]], [[5 * i + 3, 60, 7, 11, 8] for i in range(4)]]
LAYERS, NEW_TOKENS = 2, 6
LIMIT = 280
"""Timeout in seconds of an engine."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.make(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def stock(model: str) -> dict[str, Any]:
    """Stock vLLM's answers, in one process."""
    return run(replace(job(model), options={"dtype": "float32"}), **STOCK)


@pytest.fixture(scope="session")
def whole() -> envs.Env:
    """The engine's environment: this session's environment."""
    return envs.Env(Path(sys.prefix), envs.ray())


@pytest.fixture(scope="session")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., envs.Env]:
    """`without(*names)`: an environment with only these distributions."""

    def make(*names: str) -> envs.Env:
        wheels = envs.wheels(*names) if names else ()
        return envs.thin(envs.ray(), wheels, tmp_path_factory.mktemp("node") / "env")

    return make


def job(model: str, **options: Any) -> Job:
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "dtype": "float32"}
    return Job(model, PROMPTS, new_tokens=NEW_TOKENS, logits=False, options={**two, **options})


def node(env: envs.Env, number: int, **variables: str) -> Node:
    """A node with the module paths and without our settings."""
    core = {BIND: str(number)}
    return Node(env, {"NODE": str(number), **core, **PLUGINS, **variables})


def serve(job: Job, *nodes: Node, **variables: str) -> dict[str, Any]:
    """Run the job in an engine over the cluster of these nodes."""
    with cluster(*nodes) as running:
        where = {"RAY_ADDRESS": running.address, "VLLM_HOST_IP": HOST}
        return run(job, timeout=LIMIT, **where, **PLUGINS, **{**DEVICE, **variables})


def fails(job: Job, *nodes: Node, **variables: str) -> str:
    """The output of an engine that must fail."""
    with pytest.raises(EngineFailed) as failure:
        serve(job, *nodes, **variables)
    return failure.value.log
