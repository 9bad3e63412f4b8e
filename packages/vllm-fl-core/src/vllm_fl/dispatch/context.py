"""Context: the policy of a `with` block, and the plan of the model that is being built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar, Token
from typing import Any, Protocol

from ..settings.policy import SelectionPolicy

override: ContextVar[SelectionPolicy | None] = ContextVar("vllm_fl_policy", default=None)
"""The policy of the running block, or None where the global one holds."""


class _Global:
    """What `set_global_policy` gave: every manager without a policy of its own goes by it."""

    policy: SelectionPolicy | None = None


chosen = _Global()


class policy_context(ContextDecorator):
    """Resolve under `policy` inside the block, in this task and thread only.

    Layers that an engine has bound keep what they are bound to. It also decorates a function.

    Raises:
        TypeError: `policy` is no SelectionPolicy.
    """

    # A generator with `contextlib.contextmanager` would take three times as long.

    def __init__(self, policy: SelectionPolicy) -> None:
        if not isinstance(policy, SelectionPolicy):
            raise TypeError(f"policy_context takes a SelectionPolicy, got {policy!r}")
        self.policy = policy
        self._tokens: list[Token[SelectionPolicy | None]] = []

    def _recreate_cm(self) -> policy_context:
        """Another one for each call of a decorated function."""
        return policy_context(self.policy)

    def __enter__(self) -> SelectionPolicy:
        self._tokens.append(override.set(self.policy))
        return self.policy

    def __exit__(self, *_: object) -> None:
        override.reset(self._tokens.pop())


class Binder(Protocol):
    """What layers bind to while an engine's model is built: the engine's plan."""

    @property
    def mode(self) -> str:
        """`eager` or `compiled`."""

    @property
    def kept_layers(self) -> frozenset[str]:
        """Classes of vLLM's that the user leaves alone."""

    def is_stock(self, op: str) -> bool:
        """Whether the op is left to vLLM."""

    def is_partly_stock(self, op: str) -> bool:
        """Whether the op is left to vLLM at some sizes, and at others not."""

    def bind(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """`op` as a method of `layer`: `engine.plan.Plan.bind`."""


class _Building:
    """Whose model is being built. Not per thread: vLLM may build layers in threads of its own."""

    binder: Binder | None = None


def current_binder() -> Binder | None:
    """What the layers that are built now bind to; None outside an engine."""
    return _Building.binder


@contextmanager
def building(binder: Binder) -> Iterator[None]:
    """Layers that are built inside the block bind to `binder`."""
    before, _Building.binder = _Building.binder, binder
    try:
        yield
    finally:
        _Building.binder = before
