"""The operators, each with its contract's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_fl import BackendImplKind, OpImpl

__all__ = ["implementations"]


def implementations(*functions: Callable[..., Any]) -> tuple[OpImpl, ...]:
    """The functions, each named after its op, as `reference.torch`."""
    return tuple(
        OpImpl(fn.__name__, "reference.torch", BackendImplKind.REFERENCE, fn, traceable=True)
        for fn in functions
    )
