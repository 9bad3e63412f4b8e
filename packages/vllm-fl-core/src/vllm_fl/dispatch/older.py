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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import SelectionPolicy
    from .registry import OpRegistry
    from .types import AttentionImpl, OpImpl

__all__ = ["lookup", "outdated", "serve_modules"]

PACKAGE = "vllm_fl.dispatch"

MODULES = ("builtin_ops", "discovery", "logger_manager", "method_dispatch", "ops")

NAMES = {
    "CachedOp": (f"{__name__}:CachedOp", "call_op, or resolve_op once"),
    "OpRegistrySnapshot": (f"{PACKAGE}.registry:RegistrySnapshot", "RegistrySnapshot"),
    "PLUGIN_GROUP": ("vllm_fl.plugins:GROUP", "'vllm_fl.plugin'"),
    "PLUGIN_MODULES_ENV": (f"{__name__}:PLUGIN_MODULES_ENV", "'VLLM_FL_PLUGIN_MODULES'"),
    "PREFER_DEFAULT": (f"{__name__}:PREFER_DEFAULT", "'flagos'"),
    "PREFER_REFERENCE": (f"{__name__}:PREFER_REFERENCE", "'reference'"),
    "PREFER_VENDOR": (f"{__name__}:PREFER_VENDOR", "'vendor'"),
    "PolicyManager": (f"{__name__}:PolicyManager", "the functions of vllm_fl.dispatch"),
    "VALID_PREFER_VALUES": (f"{__name__}:VALID_PREFER_VALUES", "policy.KINDS"),
    "VLLMFLBackendBase": (f"{PACKAGE}.backends.base:Backend", "backends.base.Backend"),
    "get_policy_epoch": (f"{__name__}:get_policy_epoch", "get_policy(): equal policies are equal"),
    "match_token": (f"{__name__}:match_token", "policy.Token.parse(token).matches(impl)"),
    "register_builtins": (f"{__name__}:register_builtins", "discover_plugins(registry)"),
}
"""Older name -> (where its object is, what to write instead)."""

PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE = "flagos", "vendor", "reference"
VALID_PREFER_VALUES = frozenset((PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE))
PLUGIN_MODULES_ENV = "VLLM_FL_PLUGIN_MODULES"


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


class CachedOp:
    """An op that is called often: `call_op` with the name given once."""

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op."""
        from . import call_op

        return call_op(self.op_name, *args, **kwargs)


class PolicyManager:
    """The functions of `vllm_fl.dispatch` under their older roof."""

    @staticmethod
    def get_instance() -> type[PolicyManager]:
        """There is one."""
        return PolicyManager

    @staticmethod
    def get_policy() -> SelectionPolicy:
        """As `vllm_fl.dispatch.get_policy`."""
        from . import get_policy

        return get_policy()

    @staticmethod
    def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
        """As `vllm_fl.dispatch.set_global_policy`."""
        from . import set_global_policy

        return set_global_policy(policy)

    @staticmethod
    def reset_global_policy() -> None:
        """As `vllm_fl.dispatch.reset_global_policy`."""
        from . import reset_global_policy

        reset_global_policy()

    @staticmethod
    def create_policy_context(policy: SelectionPolicy) -> Any:
        """As `vllm_fl.dispatch.policy_context`."""
        from . import policy_context

        return policy_context(policy)

    @staticmethod
    def get_policy_epoch() -> int:
        """As `get_policy_epoch`."""
        return get_policy_epoch()

    @staticmethod
    def bump_policy_epoch() -> int:
        """As `OpManager.bump_policy_epoch` of the default manager."""
        from . import get_default_manager

        return get_default_manager().bump_policy_epoch()


def get_policy_epoch() -> int:
    """How often the default manager has forgotten what it had resolved."""
    from . import get_default_manager

    return get_default_manager().epoch


def match_token(impl: OpImpl | AttentionImpl, token: str) -> bool:
    """Whether `impl` stands under `token`; a token that is none matches nothing."""
    from .policy import Token

    try:
        return Token.parse(token).matches(impl)
    except ValueError:
        return False


def register_builtins(registry: OpRegistry) -> None:
    """Load the installed plugins into `registry`: no backend is built in any more."""
    from . import discover_plugins

    discover_plugins(registry)
