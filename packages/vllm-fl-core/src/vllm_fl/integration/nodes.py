"""What a worker on another node starts with, before it has its engine's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..settings.loading import STARTUP

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def carry_startup(parallel: ParallelConfig, env: Mapping[str, str] = os.environ) -> None:
    """Let Ray start an engine's workers with our variables that say how a process starts.

    All other settings travel in the engine's configuration. These are read before a process has
    one, while vLLM chooses its platform; and Ray's processes inherit the environment of their
    node. vLLM's Ray executors set the engine's own variables in a worker only after that.

    What `ray_runtime_env` sets itself stays.

    Args:
        parallel: the engine's; without Ray it stays as it is.
        env: the environment; by default the process's own.
    """
    if not parallel.use_ray:
        return
    names = [variable for spec in STARTUP.values() for variable in spec.variables]
    carried = {name: env[name] for name in names if name in env}
    if not carried:
        return
    told = dict(parallel.ray_runtime_env or {})
    # vLLM hands any mapping on to Ray.
    parallel.ray_runtime_env = {
        **told,
        "env_vars": {**carried, **told.get("env_vars", {})},
    }
