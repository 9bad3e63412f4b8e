"""Fixtures that install distributions into environments, and one core per pytest-xdist worker."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest
from engine_run import cores

import envs
from installed import Install, Installed

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Child processes inherit the core. Two engines with threads on every core busy-wait for each
    # other and take five times as long.
    usable = cores()
    os.sched_setaffinity(0, {usable[int(worker.removeprefix("gw")) % len(usable)]})


ALWAYS = ("vllm-fl-core", "vllm-fl-ops", "vllm-fl-verify", "vllm-fl-tools")


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """`install(*names, engine=False, fresh=False, without=())`: core, ops, verify, tools, `names`;
    with `engine` also torch and vLLM. A name is a distribution or a folder of tests/plugins.
    Environments are cached by set of names; tests may damage only `fresh` ones."""
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
