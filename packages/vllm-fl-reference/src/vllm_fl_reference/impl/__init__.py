"""Ops in plain PyTorch, one module per family.

Arguments and results are those in the op's contract (`vllm_fl_ops.contracts`); docstrings describe
the computation and its rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from vllm_fl import BackendImplKind, OpImpl

__all__ = ["implementations"]


def implementations(
    *functions: Callable[..., Any], consumes: Iterable[str] = (), traceable: bool = True
) -> tuple[OpImpl, ...]:
    """Return each function as `reference.torch` of the op with its name.

    If the functions overwrite no arguments, their results are made contiguous.

    Args:
        functions: one per op.
        consumes: arguments that each function overwrites.
        traceable: whether a compiler can trace into them.
    """
    return tuple(
        OpImpl(
            fn.__name__,
            "reference.torch",
            BackendImplKind.REFERENCE,
            fn if consumes else _packed(fn),
            consumes=frozenset(consumes),
            traceable=traceable,
            takes=(),  # the contract's checks only: PyTorch would silently broadcast or promote
        )
        for fn in functions
    )


def _packed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make results contiguous, because PyTorch often keeps the strides of a dense argument."""

    @wraps(fn)
    def packed(*args: Any, **kwargs: Any) -> Any:
        results = fn(*args, **kwargs)
        if isinstance(results, tuple):
            return tuple(None if part is None else part.contiguous() for part in results)
        return results.contiguous()

    return packed
