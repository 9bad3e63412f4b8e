"""The operators, each with its contract's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm_fl import BackendImplKind, OpImpl

__all__ = ["implementations"]


def implementations(
    *functions: Callable[..., Any], consumes: Iterable[str] = (), traceable: bool = True
) -> tuple[OpImpl, ...]:
    """The functions, each named after its op, as `reference.torch`.

    Args:
        functions: each an op.
        consumes: the arguments that each of them overwrites.
        traceable: whether a compiler may look inside.
    """
    return tuple(
        OpImpl(
            fn.__name__,
            "reference.torch",
            BackendImplKind.REFERENCE,
            fn,
            consumes=frozenset(consumes),
            traceable=traceable,
        )
        for fn in functions
    )
