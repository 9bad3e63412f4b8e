"""Installing distributions: a test says which, and gets an environment with just those.

And a core for each worker of pytest-xdist.
"""

from __future__ import annotations

import os

import pytest
from engine_run import cores

import envs
from installed import Install, Installed

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # What it starts keeps to this core, too. Two engines that have threads on every core wait for
    # one another spinning, and take five times as long.
    usable = cores()
    os.sched_setaffinity(0, {usable[int(worker.removeprefix("gw")) % len(usable)]})


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """`install(*names, engine=False, fresh=False, ops=True)`: core, its ops and these.

    A name is one of this repository's distributions or a folder of tests/plugins. With `engine`
    torch and vLLM are there too; without `ops` what brings the ops is missing. Asking twice for
    the same set gives the same environment, but for a `fresh` one, which the test may damage.
    """
    known: dict[tuple[bool, tuple[str, ...]], Installed] = {}

    def make(*names: str, engine: bool = False, fresh: bool = False, ops: bool = True) -> Installed:
        names = ("vllm-fl-core", *(("vllm-fl-ops",) if ops else ()), *names)
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
