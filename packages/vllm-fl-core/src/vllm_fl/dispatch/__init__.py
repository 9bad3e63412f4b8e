"""Choose and call the implementation of an op.

`call_op` and `resolve_op` are for scripts and tests. Layers use `dispatch_method`. In vLLM the same
rules determine the engine's plan.
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
from ..plugins.types import BackendImplKind, BackendPriority, OpImpl
from ..settings.loading import load_startup, policy_from_config
from ..settings.policy import SelectionPolicy
from ..settings.schema import RESERVED_NAMES
from . import manager as _manager
from .context import check_policy, chosen, override, policy_context
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

call_op = _manager.manager.call
"""`OpManager.call` of the default manager: run an op under the current policy."""
call_method_op = _manager.manager.call_as_method
"""`OpManager.call_as_method` of the default manager: run an op as a method of a layer."""


def resolve_op(op_name: str) -> Callable[..., Any]:
    """Return the function that `call_op(op_name, …)` currently runs, with the same guards.

    Raises:
        UnknownOpError: no contract and no plugin has the op.
        NoImplementationError: no implementation can run.
    """
    return get_default_manager().resolve(op_name)


def reset_default_manager() -> None:
    """Reset plugins, settings and demotions. They are loaded again at the next use.

    Raises:
        PolicySealedError: an engine's layers are bound to a plan.
    """
    chosen.policy = None
    _Discovered.plugins = None
    get_default_manager().reset()


def get_policy() -> SelectionPolicy:
    """Return the policy of the enclosing `with` block, or the global policy."""
    return override.get() or get_default_manager().policy


def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
    """Replace the global policy and end all demotions.

    It applies to every `OpManager` that was created without a policy.

    Returns:
        The previous global policy.

    Raises:
        TypeError: `policy` is not a SelectionPolicy. `reset_global_policy` restores the settings.
        SettingsError: the previous policy cannot be read from the settings.
        PolicySealedError: an engine's layers are bound to a plan.
    """
    check_policy(policy)
    before = get_default_manager().policy
    _manager.set_shared_policy(policy)
    return before


def reset_global_policy() -> None:
    """Restore the policy of the settings and end all demotions.

    Raises:
        PolicySealedError: an engine's layers are bound to a plan.
    """
    _manager.set_shared_policy(None)


def with_strict_mode(strict: bool = True) -> AbstractContextManager[SelectionPolicy]:
    """In the block, raise the first failure and do not fall back."""
    return policy_context(_replaced(get_policy(), strict=strict))


def with_preference(prefer: str) -> AbstractContextManager[SelectionPolicy]:
    """In the block, prefer a kind: flagos, vendor or reference.

    Orders of platform files are sorted accordingly. The user's orders do not change.
    """
    return policy_context(_preferring(get_policy(), prefer.lower()))


def with_allowed_vendors(*vendors: str) -> AbstractContextManager[SelectionPolicy]:
    """In the block, allow only these vendors."""
    return policy_context(_replaced(get_policy(), allow_vendors=frozenset(vendors)))


def with_denied_vendors(*vendors: str) -> AbstractContextManager[SelectionPolicy]:
    """In the block, deny these vendors in addition to those already denied."""
    policy = get_policy()
    return policy_context(_replaced(policy, deny_vendors=policy.deny_vendors | {*vendors}))


# Cached, because making a policy parses its orders, and a program may enter a policy per request.
_replaced = functools.lru_cache(maxsize=64)(dataclasses.replace)
_preferring = functools.lru_cache(maxsize=64)(SelectionPolicy.preferring)


def discover_plugins(registry: OpRegistry) -> tuple[Plugin, ...]:
    """Load the plugins that VLLM_FL_PLUGINS and VLLM_FL_PLUGIN_MODULES select into `registry`.

    Raises:
        SettingsError: either variable is invalid.
    """
    early = load_startup()
    found = _discovery.discover(early.plugin_modules)
    plugins = _plugins.load(registry, found, only=early.plugins, variables=RESERVED_NAMES)
    _Discovered.plugins = (*(_Discovered.plugins or ()), *plugins)
    return plugins


def get_discovered_plugins() -> tuple[Plugin, ...]:
    """Return the plugins that `discover_plugins` loaded. If it was not called, return those that
    the manager loaded."""
    if _Discovered.plugins is not None:
        return _Discovered.plugins
    return get_default_manager().registry.plugins


def clear_discovered_plugins() -> None:
    """Empty the list of `get_discovered_plugins`. Registered implementations are kept."""
    _Discovered.plugins = ()


class _Discovered:
    plugins: tuple[Plugin, ...] | None = None
