"""What an engine carries to its workers: our entry in `additional_config`, and variables by Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..settings.loading import STARTUP
from ..settings.schema import COMMAND_LINE, Settings, variables_of
from ..text import kind_of

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

KEY = "vllm_fl"
"""Our entry in vLLM's `additional_config`, which vLLM hashes into its compile-cache key."""


class Carried(dict[str, Any]):
    """What is under `KEY`, on its way between the processes of an engine.

    Args:
        settings: the engine's; None where nobody has read them yet, or the plan is sealed. They
            travel along, and vLLM hashes the entries alone.
        orders: op or group -> its order, which the user wrote there; part of `settings` later.
        entries: what is under `KEY`: `user` of `planning.note_user_priority`, `enabled` of
            `planning.apply`, `passes` of `Fusions.configure`, `edges` of `graphs.ranges.split`, and
            `plan`, the digest, of `seal`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        orders: Mapping[str, object] = MappingProxyType({}),
        **entries: Any,
    ) -> None:
        super().__init__(entries)
        self.settings, self.orders = settings, orders

    def __reduce__(self) -> tuple[Any, ...]:
        return Carried, (self.settings,), None, None, iter(self.items())


def seal(vllm_config: VllmConfig, digest: str) -> Callable[[], None]:
    """Put the plan's digest where vLLM's compile-cache key is made from.

    It takes the place of the settings: those that do not change the plan must not miss the cache.

    Returns:
        What puts back what was there before, for a start that must plan once more.
    """
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        return lambda: None
    before = extra.get(KEY)
    extra[KEY] = Carried(plan=digest)
    if enabled := (before or {}).get("enabled"):
        extra[KEY]["enabled"] = enabled

    def unseal() -> None:
        if before is None:
            del extra[KEY]
        else:
            extra[KEY] = before

    return unseal


def is_sealed(vllm_config: VllmConfig) -> bool:
    """Whether a worker of this engine has sealed its plan: nothing of it may change any more."""
    return "plan" in entry_of(vllm_config)


def digest_of(vllm_config: VllmConfig) -> str:
    """The digest of the sealed plan; empty before it is sealed."""
    return str(entry_of(vllm_config).get("plan", ""))


def entry_of(vllm_config: VllmConfig) -> Carried:
    """What the configuration carries. An object of the user's own carries nothing: what is put into
    the answer is lost then."""
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        return Carried()
    entry = extra.setdefault(KEY, Carried())
    if isinstance(entry, Carried):
        return entry
    if not isinstance(entry, Mapping) or not all(isinstance(op, str) for op in entry):
        raise SettingsError(
            f"{COMMAND_LINE}: expected {KEY}.OP=a|b, the order of an op or group, got "
            f"{kind_of(entry)}. Other settings are variables or keys of VLLM_FL_CONFIG's file",
            key=KEY,
            origin=COMMAND_LINE,
        )
    extra[KEY] = carried = Carried(orders=dict(entry))
    return carried


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
    names = [variable for spec in STARTUP.values() for variable in variables_of(spec)]
    carried = {name: env[name] for name in names if name in env}
    if not carried:
        return
    env_of_ray = dict(parallel.ray_runtime_env or {})
    env_of_ray["env_vars"] = {**carried, **env_of_ray.get("env_vars", {})}
    parallel.ray_runtime_env = env_of_ray  # vLLM hands any mapping on to Ray
