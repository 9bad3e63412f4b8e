"""Data that an engine sends to its workers: an entry in `additional_config`, and Ray variables."""

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
"""The key of vllm-fl's entry in vLLM's `additional_config`. vLLM hashes the entry into its
compile-cache key."""


class Carried(dict[str, Any]):
    """The value under `KEY`, which travels between the processes of an engine.

    Args:
        settings: the engine's settings; None before they are read and after the plan is sealed.
            vLLM hashes only `entries`.
        orders: op or group -> its order on vLLM's command line; empty after the settings are read.
        entries: `user` (set by `planning.note_user_priority`), `enabled` (by `planning.apply`),
            `passes` (by `Fusions.configure`), `edge` (by `graphs.ranges.split`), and `plan`, the
            digest (by `seal`).
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
    """Add the plan's digest to the configuration, for vLLM's compile-cache key. The digest replaces
    the settings, so a setting that does not change the plan causes no cache miss. Returns a
    function that restores the previous entry, for a startup that must plan again."""
    extra = vllm_config.additional_config
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


def is_planned(vllm_config: VllmConfig) -> bool:
    """Whether vllm-fl has changed the configuration for a plan, in this or another process."""
    return not {"enabled", "plan"}.isdisjoint(carried_entry(vllm_config))


def digest_of(vllm_config: VllmConfig) -> str:
    return str(carried_entry(vllm_config).get("plan", ""))


def carried_entry(vllm_config: VllmConfig) -> Carried:
    """Return vllm-fl's entry in the configuration. Create it if it is missing. Raises SettingsError
    if the user has set an invalid entry, or `additional_config` to an object that is not a dict:
    without the digest, vLLM would use compiled code of another plan."""
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        kind = type(extra).__name__
        text = f"expected a dict, because vllm-fl adds an entry, got an object of class {kind}"
        raise SettingsError(f"additional_config: {text}", key=KEY, origin="additional_config")
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
    """Add vllm-fl's startup variables to the Ray runtime environment of an engine's workers. A Ray
    process inherits the environment of its node, and vLLM sets the engine's variables only after
    the worker has chosen its platform. Variables in `ray_runtime_env` are kept."""
    if not parallel.use_ray:
        return
    names = [variable for spec in STARTUP.values() for variable in variables_of(spec)]
    carried = {name: env[name] for name in names if name in env}
    if not carried:
        return
    env_of_ray = dict(parallel.ray_runtime_env or {})
    env_of_ray["env_vars"] = {**carried, **env_of_ray.get("env_vars", {})}
    parallel.ray_runtime_env = env_of_ray  # vLLM passes any mapping to Ray
