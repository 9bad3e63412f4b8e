"""Core with each backend of this repository alone, and with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import envs
from installed import Install

BACKENDS = sorted(set(envs.distributions()) - {"vllm-fl-core", "vllm-fl-ops", "vllm-fl-tools"})
WITHOUT_OPS = {"vllm-fl-flagcx"}
"""What brings a communicator, and no ops."""

ELSEWHERE = {"vllm-fl-ascend", "vllm-fl-cuda", "vllm-fl-flaggems"}
"""Those whose ops need a device, or a build of vLLM, that the tests' environment has not."""

OPS = ["gelu_and_mul", "rms_norm", "rotary_embedding", "silu_and_mul"]
"""Ops that each of them brings; some bring more."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_backend_is_seen_and_no_other(install: Install, backend: str) -> None:
    installed = install(backend, engine=True)
    (plugin,) = installed.plugins(status=0).values()
    assert plugin["distribution"] == backend
    assert plugin["name"] == backend.removeprefix("vllm-fl-")
    assert plugin["status"] == "ok"
    assert plugin["error"] is None
    assert plugin["version"]
    assert plugin["path"].startswith(str(installed.env.path))
    assert ("communicator" if backend in WITHOUT_OPS else "register_ops") in plugin["hooks"]


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - ELSEWHERE - WITHOUT_OPS))
def test_every_candidate_is_from_the_one_backend(install: Install, backend: str) -> None:
    # Without AVX-512 vLLM's CPU build lacks kernels: an op that is not among `OPS` has nobody then.
    is_whole = "avx512f" in Path("/proc/cpuinfo").read_text()
    ops = install(backend, engine=True).ops(status=0 if is_whole else None)
    assert set(OPS) <= set(ops)
    for op in OPS:
        (candidate,) = ops[op]["candidates"]
        assert candidate["distribution"] == backend
        assert candidate["status"] == "selected"
        assert ops[op]["selected"] == candidate["impl_id"]


@pytest.mark.parametrize("backend", sorted(ELSEWHERE))
def test_a_backend_for_another_machine_says_why_it_is_not_taken(
    install: Install, backend: str
) -> None:
    installed = install(backend, engine=True)
    ops = installed.ops()
    for op in OPS:
        (candidate,) = ops[op]["candidates"]
        assert candidate["distribution"] == backend
        assert candidate["status"] == "rejected"
        assert candidate["reason"].startswith("not available: ")
        assert "availability check" not in candidate["reason"]  # it is the backend's own reason


def test_all_backends_together(install: Install) -> None:
    installed = install(*BACKENDS, engine=True)
    plugins = installed.plugins(status=0)
    assert sorted(plugins) == BACKENDS
    assert {plugin["status"] for plugin in plugins.values()} == {"ok"}
    ops = installed.ops(status=0)
    for op in OPS:
        candidates = ops[op]["candidates"]
        assert [c["status"] for c in candidates].count("selected") == 1
        assert {c["distribution"] for c in candidates} == set(BACKENDS) - WITHOUT_OPS
        assert all(c["reason"] for c in candidates if c["status"] == "rejected")


def test_what_our_wheels_depend_on_is_installed(install: Install) -> None:
    """pip's own check, for our distributions: a dependency that is not declared cannot hide."""
    everything = install("vllm-fl-tools", *BACKENDS, engine=True)
    done = everything.run("-m", "pip", "check", "--disable-pip-version-check")
    assert not [line for line in done.stdout.splitlines() if line.startswith("vllm-fl-")]
