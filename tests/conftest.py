"""Installing distributions: a test says which, and gets an environment with just those."""

from __future__ import annotations

import pytest

import envs
from installed import Install, Installed


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """`install(*names, engine=False, fresh=False)`: core and these, in an environment of their own.

    A name is one of this repository's distributions or a folder of tests/plugins. With `engine`
    torch and vLLM are there too. Asking twice for the same set gives the same environment, but for
    a `fresh` one, which the test may damage.
    """
    known: dict[tuple[bool, tuple[str, ...]], Installed] = {}

    def make(*names: str, engine: bool = False, fresh: bool = False) -> Installed:
        key = (engine, names)
        if fresh or key not in known:
            wheels = envs.wheels("vllm-fl-core", *names)
            base = envs.engine() if engine else envs.light()
            path = tmp_path_factory.mktemp("env") / "env"
            installed = Installed(envs.thin(base, wheels, path))
            if fresh:
                return installed
            known[key] = installed
        return known[key]

    return make
