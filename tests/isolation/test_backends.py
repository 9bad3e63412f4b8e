"""Core with all backends of this repository, and with each separately."""

from __future__ import annotations

import pytest

import envs
from installed import Install, Installed

COMMON = {"vllm-fl", "vllm-fl-core", "vllm-fl-ops", "vllm-fl-verify", "vllm-fl-tools"}
DISTRIBUTIONS = envs.distributions()
BACKENDS = sorted(set(DISTRIBUTIONS) - COMMON)
WITHOUT_OPS = {"vllm-fl-flagcx"}
"""Distributions with a communicator and no ops."""

ELSEWHERE = {"vllm-fl-ascend", "vllm-fl-cuda", "vllm-fl-flaggems"}
"""Backends with ops that need a device or a vLLM build missing in the tests' environment."""

OPS = ["gelu_and_mul", "rms_norm", "rotary_embedding", "silu_and_mul"]
"""Ops that every backend provides; some provide more."""

ENTRY_POINTS = """
import json
from importlib.metadata import distributions
loaded = []
for dist in [*distributions()]:  # our import of importlib_metadata adds a finder
    if dist.name.startswith("vllm-fl-"):
        for entry in dist.entry_points:
            entry.load()
            loaded.append(f"{entry.group}: {entry.name}")
print(json.dumps(sorted(loaded)))
"""


@pytest.fixture(scope="module")
def everything(install: Install) -> Installed:
    return install(*BACKENDS, engine=True)


def assert_listed(installed: Installed, *backends: str) -> None:
    """Exactly these plugins are loaded, from this environment."""
    plugins = installed.plugins()
    assert sorted(plugins) == sorted(backends)
    for backend, plugin in plugins.items():
        assert plugin["name"] == backend.removeprefix("vllm-fl-")
        assert (plugin["status"], plugin["error"]) == ("ok", None)
        assert plugin["version"] and plugin["path"].startswith(str(installed.env.path))
        assert ("communicator" if backend in WITHOUT_OPS else "register_ops") in plugin["hooks"]


def test_all_backends_together(everything: Installed) -> None:
    assert_listed(everything, *BACKENDS)
    ops = everything.ops()
    for op in OPS:
        candidates = ops[op]["candidates"]
        assert [c["status"] for c in candidates].count("selected") == 1
        assert {c["distribution"] for c in candidates} == set(BACKENDS) - WITHOUT_OPS
        for candidate in candidates:
            if candidate["distribution"] in ELSEWHERE:  # for another machine: it reports its reason
                assert candidate["status"] == "rejected"
                assert candidate["reason"].startswith("not available: ")
                assert "availability check" not in candidate["reason"]


def test_the_requirements_of_our_wheels_are_installed(everything: Installed) -> None:
    """`pip check` of our distributions detects undeclared dependencies."""
    done = everything.run("-m", "pip", "check", "--disable-pip-version-check")
    assert not [line for line in done.stdout.splitlines() if line.startswith("vllm-fl-")]


def test_every_entry_point_loads(everything: Installed) -> None:
    plugins = [f"vllm_fl.plugin: {name.removeprefix('vllm-fl-')}" for name in BACKENDS]
    ours = ["console_scripts: vllm-fl", "vllm.general_plugins: fl", "vllm.platform_plugins: fl"]
    ours += ["vllm_fl.contracts: ops", "pytest11: vllm-fl"]
    ours += ["vllm_fl.extension: operate", "vllm_fl.extension: verify"]
    assert everything.script(ENTRY_POINTS) == sorted(ours + plugins)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_backend_is_seen_and_no_other(install: Install, backend: str) -> None:
    installed = install(backend, engine=True)
    assert_listed(installed, backend)
    if backend in WITHOUT_OPS | ELSEWHERE:
        return
    ops = installed.ops()
    for op in OPS:
        (candidate,) = ops[op]["candidates"]
        assert (candidate["distribution"], candidate["status"]) == (backend, "selected")
        assert ops[op]["selected"] == candidate["impl_id"]
