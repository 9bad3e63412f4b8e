"""The policy of a block, per task and thread, over the global policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import ParamSpec, TypeVar

from .policy import SelectionPolicy

__all__ = ["chosen", "override", "policy_context"]

P = ParamSpec("P")
R = TypeVar("R")

override: ContextVar[SelectionPolicy | None] = ContextVar("vllm_fl_policy", default=None)
"""The policy of the running block, or None where the global one holds."""


class _Global:
    """What `set_global_policy` gave: every manager without a policy of its own goes by it."""

    policy: SelectionPolicy | None = None


chosen = _Global()


class policy_context:
    """Resolve under `policy` inside the block, in this task and thread only.

    Layers that an engine has bound keep what they are bound to. It also decorates a function.

    Raises:
        TypeError: `policy` is no SelectionPolicy.
    """

    __slots__ = ("_tokens", "policy")

    # A generator with `contextlib.contextmanager` would take three times as long.

    def __init__(self, policy: SelectionPolicy) -> None:
        if not isinstance(policy, SelectionPolicy):
            raise TypeError(f"policy_context takes a SelectionPolicy, got {policy!r}")
        self.policy = policy
        self._tokens: list[Token[SelectionPolicy | None]] = []

    def __enter__(self) -> SelectionPolicy:
        self._tokens.append(override.set(self.policy))
        return self.policy

    def __exit__(self, *_: object) -> None:
        override.reset(self._tokens.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, each call of which runs inside a block of its own."""

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with policy_context(self.policy):
                return function(*args, **kwargs)

        return inside
