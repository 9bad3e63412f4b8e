"""Objects of vllm-plugin-FL's API that have no counterpart in ours.

`vllm_fl.older` says which names these are, and warns where one is used: it is imported then.
"""

from __future__ import annotations

from typing import Any

from .. import dispatch
from ..plugins.registry import OpRegistry
from ..plugins.types import Impl
from ..settings.policy import Token

PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE = "flagos", "vendor", "reference"
VALID_PREFER_VALUES = frozenset((PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE))
PLUGIN_MODULES_ENV = "VLLM_FL_PLUGIN_MODULES"


class CachedOp:
    """An op that is called often: `call_op` with the name given once."""

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op."""
        return dispatch.call_op(self.op_name, *args, **kwargs)


def get_policy_epoch() -> int:
    """How often the default manager has forgotten what it had resolved."""
    return dispatch.get_default_manager().epoch


class PolicyManager:
    """The functions of `vllm_fl.dispatch` that set and read the policy, as one class."""

    get_policy = staticmethod(dispatch.get_policy)
    set_global_policy = staticmethod(dispatch.set_global_policy)
    reset_global_policy = staticmethod(dispatch.reset_global_policy)
    create_policy_context = staticmethod(dispatch.policy_context)
    get_policy_epoch = staticmethod(get_policy_epoch)

    @staticmethod
    def get_instance() -> type[PolicyManager]:
        """There is one."""
        return PolicyManager

    @staticmethod
    def bump_policy_epoch() -> int:
        """As `OpManager.bump_policy_epoch` of the default manager."""
        return dispatch.get_default_manager().bump_policy_epoch()


def match_token(impl: Impl, token: str) -> bool:
    """Whether `token` matches `impl`; an invalid token matches nothing."""
    try:
        return Token.parse(token).matches(impl)
    except ValueError:
        return False


def register_builtins(registry: OpRegistry) -> None:
    """Load the installed plugins into `registry`: no backend is built in any more."""
    dispatch.discover_plugins(registry)
