"""The policy of a `with` block, and the plan of the model that is being built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar, Token
from typing import Any, Protocol

from ..settings.policy import SelectionPolicy

override: ContextVar[SelectionPolicy | None] = ContextVar("vllm_fl_policy", default=None)


class _Global:
    """The policy that `set_global_policy` has set, for managers that were created without a
    policy."""

    policy: SelectionPolicy | None = None


chosen = _Global()


def check_policy(policy: object) -> None:
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"expected a SelectionPolicy, got {policy!r}")


class policy_context(ContextDecorator):
    """Resolve with `policy` inside the block, only in this task and thread.

    Layers that are bound to an engine do not change. It can also be used as a decorator.

    Raises:
        TypeError: `policy` is not a SelectionPolicy.
    """

    def __init__(self, policy: SelectionPolicy) -> None:
        check_policy(policy)
        self.policy = policy
        self._tokens: list[Token[SelectionPolicy | None]] = []

    def _recreate_cm(self) -> policy_context:
        """Return a new context for each call of a decorated function."""
        return policy_context(self.policy)

    def __enter__(self) -> SelectionPolicy:
        self._tokens.append(override.set(self.policy))
        return self.policy

    def __exit__(self, *_: object) -> None:
        override.reset(self._tokens.pop())


class Binder(Protocol):
    """The engine's plan, as seen by layers that are built for the engine's model."""

    @property
    def mode(self) -> str:
        """`eager` or `compiled`."""

    @property
    def kept_layers(self) -> frozenset[str]:
        """The layer classes of vLLM that the user excluded from replacement."""

    def is_stock(self, op: str) -> bool:
        """Whether the op is `stock`."""

    def is_partly_stock(self, op: str) -> bool:
        """Whether the op is `stock` at some sizes but not at others."""

    def bind(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return an op as a method of a layer; see `engine.plan.Plan.bind`."""


class _Building:
    """The plan of the model that is being built. All threads share it, because vLLM may build
    layers in threads."""

    binder: Binder | None = None


def current_binder() -> Binder | None:
    """Return the plan that new layers bind to; None outside an engine."""
    return _Building.binder


@contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """Inside the block, an attribute of `owner` has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def building(binder: Binder) -> AbstractContextManager[None]:
    """Bind the layers that are built inside the block to `binder`."""
    return swapped(_Building, "binder", binder)
