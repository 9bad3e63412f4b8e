"""Names of vllm-plugin-FL that have become others: each works, and warns of what to write instead.

Its modules `builtin_ops`, `discovery`, `logger_manager`, `method_dispatch` and `ops` are served
from here, too: each has what `vllm_fl.dispatch` has, and the names below.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "vllm_fl.dispatch"
HOME = f"{PACKAGE}.older"

MODULES = ("builtin_ops", "discovery", "logger_manager", "method_dispatch", "ops")

NAMES = {
    "CachedOp": (f"{HOME}:CachedOp", "call_op, or resolve_op once"),
    "OpRegistrySnapshot": ("vllm_fl.plugins.snapshot:RegistrySnapshot", "RegistrySnapshot"),
    "PLUGIN_GROUP": ("vllm_fl.plugins.discovery:GROUP", "'vllm_fl.plugin'"),
    "PLUGIN_MODULES_ENV": (f"{HOME}:PLUGIN_MODULES_ENV", "'VLLM_FL_PLUGIN_MODULES'"),
    "PREFER_DEFAULT": (f"{HOME}:PREFER_DEFAULT", "'flagos'"),
    "PREFER_REFERENCE": (f"{HOME}:PREFER_REFERENCE", "'reference'"),
    "PREFER_VENDOR": (f"{HOME}:PREFER_VENDOR", "'vendor'"),
    "PolicyManager": (f"{HOME}:PolicyManager", "the functions of vllm_fl.dispatch"),
    "VALID_PREFER_VALUES": (f"{HOME}:VALID_PREFER_VALUES", "policy.KINDS"),
    "VLLMFLBackendBase": (f"{PACKAGE}.backends.base:Backend", "backends.base.Backend"),
    "get_policy_epoch": (f"{HOME}:get_policy_epoch", "get_policy(): equal policies are equal"),
    "match_token": (f"{HOME}:match_token", "policy.Token.parse(token).matches(impl)"),
    "register_builtins": (f"{HOME}:register_builtins", "discover_plugins(registry)"),
}
"""Older name -> (where its object is, what to write instead)."""


def outdated(what: str, instead: str, *, stacklevel: int = 3) -> None:
    """Warn that `what` is an older name, and of what to write `instead`."""
    warnings.warn(
        f"{what} is vllm-plugin-FL's: use {instead}", DeprecationWarning, stacklevel=stacklevel
    )


def lookup(name: str, *, module: str = PACKAGE, stacklevel: int = 3) -> Any:
    """The object of an older name, for the `__getattr__` of a module that had it.

    Raises:
        AttributeError: nobody had a name like it.
    """
    if name in MODULES and module == PACKAGE:
        return sys.modules[f"{PACKAGE}.{name}"]
    if name in NAMES:
        home, instead = NAMES[name]
    elif module != PACKAGE and name in getattr(sys.modules.get(PACKAGE), "__all__", ()):
        home = instead = f"{PACKAGE}:{name}"
    else:
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
    outdated(f"{module}.{name}", instead.replace(":", "."), stacklevel=stacklevel)
    where, _, attribute = home.partition(":")
    return getattr(import_module(where), attribute)


def serve_modules() -> None:
    """Make the older module names importable. What they hold is looked up when it is read."""
    for name in MODULES:
        module = ModuleType(f"{PACKAGE}.{name}", "An older module name; see vllm_fl.dispatch.")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__getattr__ = partial(lookup, module=module.__name__)  # type: ignore[method-assign]
        sys.modules.setdefault(module.__name__, module)


class OlderManager:
    """Names that vllm-plugin-FL's `OpManager` has and ours has others for."""

    def bump_policy_epoch(self: Any) -> int:
        """Deprecated: forget what was resolved and end every demotion; returns the epoch."""
        outdated("OpManager.bump_policy_epoch", "clear_failed_impls()")
        self.clear_failed_impls()
        return int(self.epoch)

    @property
    def policy_epoch(self: Any) -> int:
        """Deprecated: see `epoch`."""
        outdated("OpManager.policy_epoch", "epoch")
        return int(self.epoch)

    def get_failed_impls(self: Any, op: str | None = None) -> dict[str, set[str]]:
        """Deprecated: op -> the ids of what was demoted; see `demotions`."""
        outdated("OpManager.get_failed_impls", "demotions")
        failed: dict[str, set[str]] = {}
        for name, impl_id in self.demotions:
            if op in (None, name):
                failed.setdefault(name, set()).add(impl_id)
        return failed
