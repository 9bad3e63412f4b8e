"""The policy of a block: an override per task and thread over the global policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .policy import SelectionPolicy

__all__ = ["override", "policy_context"]

override: ContextVar[SelectionPolicy | None] = ContextVar("vllm_fl_policy", default=None)
"""The policy of the running block, or None where the global one holds."""


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Resolve under `policy` inside the block, in this task and thread only.

    Layers that an engine has bound keep what they are bound to.

    Raises:
        TypeError: `policy` is no SelectionPolicy.
    """
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"policy_context takes a SelectionPolicy, got {policy!r}")
    token = override.set(policy)
    try:
        yield policy
    finally:
        override.reset(token)
