"""Note which part of a plugin's class vLLM's side is running, and whose it is."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..dispatch import get_default_manager
from ..plugins.breadcrumb import running

__all__ = ["noted"]


def noted(what: str, op: str, impl_id: str) -> AbstractContextManager[None]:
    """While the block runs, it is noted for the next process.

    Args:
        what: which part runs: `the supports`, `the class`.
        op, impl_id: of which implementation.
    """
    owner = get_default_manager().registry.snapshot().owners.get((op, impl_id))
    whose = owner.name if owner else ""
    return running(f"{what} of {op}={impl_id}{whose and f' of {whose}'}", whose)
