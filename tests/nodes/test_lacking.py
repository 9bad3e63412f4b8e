"""A node of a Ray cluster lacks something: disabled on all ranks, or named in a message."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from cluster import Node
from engine_run import BIND
from nodes import CORE, OPS, REFERENCE, VERIFY, fails, job, node, serve

import envs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OP = "silu_and_mul"


def test_what_one_node_lacks_is_off_on_all_and_another_version_is_named(
    model: str, whole: envs.Env, without: Callable[..., envs.Env]
) -> None:
    other = without(CORE, OPS, VERIFY, REFERENCE)
    (metadata,) = other.site_packages.glob("vllm_fl_reference-*.dist-info/METADATA")
    version = re.compile(r"^Version: (.+)$", re.MULTILINE)
    (released,) = version.findall(metadata.read_text())
    metadata.write_text(version.sub("Version: 9.9", metadata.read_text(), count=1))
    nodes = node(whole, 0), node(other, 1)
    ordered = {"VLLM_FL_PER_OP": f"{OP}=vendor|reference", "VLLM_FL_DISPATCH_DEBUG": "1"}
    result = serve(job(model), *nodes, **ordered)
    first, second = result["report"]
    # The reasons differ: what is not installed on rank 1 is not a candidate there.
    impls = [{op: entry["impl"] for op, entry in rank["ops"].items()} for rank in (first, second)]
    assert impls[0] == impls[1]
    for rank in (first, second):
        assert rank["calls"][OP].keys() == {"reference.torch"}
        assert "missing on rank 1: vllm-fl-cpu" in rank["demotions"][OP]["vendor.cpu"]
    # A set: the log monitor of each node on this machine reads the logs of both.
    lines = set(result["log"].splitlines())
    (line,) = [line for line in lines if f"'vendor.cpu' of op '{OP}' is disabled on all" in line]
    assert f"missing on rank 1. Install vllm-fl-cpu {released} on its node" in line

    assert first["digest"] != second["digest"]
    (line,) = [line for line in lines if f"The ranks differ. {OP}: " in line]
    assert f"rank 0 has reference.torch (vllm-fl-reference {released}" in line
    assert "rank 1 has reference.torch (vllm-fl-reference 9.9" in line


def test_a_node_without_the_devices_plugin_ends_the_start(model: str, whole: envs.Env) -> None:
    bare = Node(whole, {BIND: "1"})
    log = fails(job(model), node(whole, 0), bare)
    assert "Plugin 'oot_cpu' of oot_cpu failed: ModuleNotFoundError" in log
    assert "current platform cpu does not support ray" in log


def test_a_node_without_vllm_fl_ends_the_start(
    model: str, whole: envs.Env, without: Callable[..., envs.Env]
) -> None:
    log = fails(job(model), node(whole, 0), node(without(), 1))
    assert "No module named 'vllm_fl'" in log


def test_a_node_without_the_verifier_ends_the_start(
    model: str, whole: envs.Env, without: Callable[..., envs.Env]
) -> None:
    log = fails(job(model), node(whole, 0), node(without(CORE, OPS, REFERENCE), 1))
    assert f"{VERIFY} is missing on rank 1. Install it on its node" in log
