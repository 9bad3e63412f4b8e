"""The operators, each with its contract's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from vllm_fl import BackendImplKind, OpImpl

__all__ = ["implementations"]


def implementations(
    *functions: Callable[..., Any], consumes: Iterable[str] = (), traceable: bool = True
) -> tuple[OpImpl, ...]:
    """The functions, each named after its op, as `reference.torch`, with contiguous results.

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
            fn if consumes else _packed(fn),
            consumes=frozenset(consumes),
            traceable=traceable,
            takes=(),  # PyTorch would broadcast, promote or truncate in silence
        )
        for fn in functions
    )


def _packed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with contiguous results: PyTorch gives many the strides of a dense argument."""

    @wraps(fn)
    def packed(*args: Any, **kwargs: Any) -> Any:
        results = fn(*args, **kwargs)
        if isinstance(results, tuple):
            return tuple(None if part is None else part.contiguous() for part in results)
        return results.contiguous()

    return packed
