"""Installing distributions: a test says which, and gets an environment with just those.

And a core for each worker of pytest-xdist.
"""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest
from engine_run import cores

import envs
from installed import Install, Installed

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # What it starts keeps to this core, too. Two engines that have threads on every core wait for
    # one another spinning, and take five times as long.
    usable = cores()
    os.sched_setaffinity(0, {usable[int(worker.removeprefix("gw")) % len(usable)]})


ALWAYS = ("vllm-fl-core", "vllm-fl-ops", "vllm-fl-verify", "vllm-fl-tools")


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """`install(*names, engine=False, fresh=False, without=())`: core, ops, verify, tools and these.

    A name is one of this repository's distributions or a folder of tests/plugins. With `engine`
    torch and vLLM are installed too. Asking twice for the same set gives the same environment,
    except a `fresh` one, which the test may damage.
    """
    known: dict[tuple[bool, tuple[str, ...]], Installed] = {}

    def make(
        *names: str, engine: bool = False, fresh: bool = False, without: Collection[str] = ()
    ) -> Installed:
        names = (*(name for name in ALWAYS if name not in without), *names)
        key = (engine, names)
        if fresh or key not in known:
            wheels = envs.wheels(*names)
            base = envs.engine() if engine else envs.light()
            path = tmp_path_factory.mktemp("env") / "env"
            installed = Installed(envs.thin(base, wheels, path))
            if fresh:
                return installed
            known[key] = installed
        return known[key]

    return make
