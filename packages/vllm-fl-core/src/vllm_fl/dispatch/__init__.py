"""Choose the implementation of an op, and call it.

`call_op` and `resolve_op` are for scripts and tests; layers use `dispatch_method`. Under vLLM the
same rules make the engine's plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..logs import get_logger, set_log_level
from ..plugins import discovery as _discovery
from ..plugins import loading as _plugins
from ..plugins.plugin import Plugin
from ..plugins.registry import OpRegistry
from ..plugins.types import (
    BackendImplKind,
    BackendPriority,
    OpImpl,
)
from ..settings.loading import load_startup, policy_from_config
from ..settings.policy import SelectionPolicy
from ..settings.schema import TAKEN as _TAKEN
from . import manager as _manager
from .context import chosen, override, policy_context
from .manager import OpManager, get_default_manager
from .method import dispatch_method

__all__ = [
    "BackendImplKind",
    "BackendPriority",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "SelectionPolicy",
    "call_method_op",
    "call_op",
    "clear_discovered_plugins",
    "discover_plugins",
    "dispatch_method",
    "get_default_manager",
    "get_discovered_plugins",
    "get_logger",
    "get_policy",
    "policy_context",
    "policy_from_config",
    "reset_default_manager",
    "reset_global_policy",
    "resolve_op",
    "set_global_policy",
    "set_log_level",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]

# The call path is the manager's own method: one function call less than a wrapper around it.
call_op = _manager.manager.call
"""`OpManager.call` of the default manager: run an op on these arguments, by the policy in force."""
call_method_op = _manager.manager.call_as_method
"""`OpManager.call_as_method` of the default manager: the same for a layer, which comes first."""


def resolve_op(op_name: str) -> Callable[..., Any]:
    """The function that `call_op(op_name, …)` runs now, with the same guards.

    Raises:
        UnknownOpError: neither a contract nor a plugin names the op.
        NoImplementationError: no implementation may run.
    """
    return get_default_manager().resolve(op_name)


def reset_default_manager() -> None:
    """Forget everything: plugins, settings and demotions are found anew at the next use.

    Raises:
        PolicySealedError: an engine's layers are bound to a plan.
    """
    chosen.policy = None
    _Discovered.plugins = None
    get_default_manager().reset()


def get_policy() -> SelectionPolicy:
    """The policy in force: that of the running block, or the global one."""
    return override.get() or get_default_manager().policy


def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
    """Replace the global policy; ends every demotion.

    It holds for every `OpManager` that was given no policy of its own.

    Returns:
        The global policy before, so that it can be set again.

    Raises:
        SettingsError: the settings, which gave the policy before, cannot be read.
        PolicySealedError: an engine's layers are bound to a plan.
    """
    before = get_default_manager().policy
    _manager.set_global_policy(policy)
    return before


def reset_global_policy() -> None:
    """Go back to the policy that the settings give; ends every demotion.

    Raises:
        PolicySealedError: an engine's layers are bound to a plan.
    """
    _manager.set_global_policy(None)


def with_strict_mode(strict: bool = True) -> AbstractContextManager[SelectionPolicy]:
    """In the block, raise the first failure and try nothing else."""
    return policy_context(_replaced(get_policy(), strict=strict))


def with_preference(prefer: str) -> AbstractContextManager[SelectionPolicy]:
    """In the block, prefer a kind: flagos, vendor or reference.

    Lists that a platform file brought are re-sorted; lists that the user wrote stand.
    """
    return policy_context(_preferring(get_policy(), prefer.lower()))


def with_allowed_vendors(*vendors: str) -> AbstractContextManager[SelectionPolicy]:
    """In the block, allow these vendors only."""
    return policy_context(_replaced(get_policy(), allow_vendors=frozenset(vendors)))


def with_denied_vendors(*vendors: str) -> AbstractContextManager[SelectionPolicy]:
    """In the block, deny these vendors too."""
    policy = get_policy()
    return policy_context(_replaced(policy, deny_vendors=policy.deny_vendors | {*vendors}))


# Making a policy reads its orders anew: one that is entered at every request is made once.
_replaced = functools.lru_cache(maxsize=64)(dataclasses.replace)
_preferring = functools.lru_cache(maxsize=64)(SelectionPolicy.preferring)


def discover_plugins(registry: OpRegistry) -> tuple[Plugin, ...]:
    """Find and load the plugins into `registry`, as VLLM_FL_PLUGINS and VLLM_FL_PLUGIN_MODULES say.

    Raises:
        SettingsError: one of the two is wrong.
    """
    early = load_startup()
    found = _discovery.discover(early.plugin_modules)
    plugins = _plugins.load(registry, found, only=early.plugins, variables=_TAKEN)
    _Discovered.plugins = (*(_Discovered.plugins or ()), *plugins)
    return plugins


def get_discovered_plugins() -> tuple[Plugin, ...]:
    """The plugins that `discover_plugins` found, or else the plugins of the default manager."""
    if _Discovered.plugins is not None:
        return _Discovered.plugins
    return get_default_manager().registry.plugins


def clear_discovered_plugins() -> None:
    """Empty the list of `get_discovered_plugins`; what is registered stays."""
    _Discovered.plugins = ()


class _Discovered:
    plugins: tuple[Plugin, ...] | None = None
    """None: `discover_plugins` was not called."""
