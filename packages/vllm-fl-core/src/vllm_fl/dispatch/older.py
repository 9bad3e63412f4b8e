"""Objects of vllm-plugin-FL's API that have no counterpart in ours.

`vllm_fl.older` says which names these are, and warns where one is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..plugins.registry import OpRegistry
    from ..plugins.types import Impl
    from ..settings.policy import SelectionPolicy

PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE = "flagos", "vendor", "reference"
VALID_PREFER_VALUES = frozenset((PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE))
PLUGIN_MODULES_ENV = "VLLM_FL_PLUGIN_MODULES"


class CachedOp:
    """An op that is called often: `call_op` with the name given once."""

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op."""
        from . import call_op

        return call_op(self.op_name, *args, **kwargs)


class PolicyManager:
    """The functions of `vllm_fl.dispatch` that set and read the policy, as one class."""

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


def match_token(impl: Impl, token: str) -> bool:
    """Whether `token` matches `impl`; an invalid token matches nothing."""
    from ..settings.policy import Token

    try:
        return Token.parse(token).matches(impl)
    except ValueError:
        return False


def register_builtins(registry: OpRegistry) -> None:
    """Load the installed plugins into `registry`: no backend is built in any more."""
    from . import discover_plugins

    discover_plugins(registry)
