"""Implementations that are classes of a plugin's, which vLLM is given by their paths."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...dispatch import get_default_manager
from ...plugins.breadcrumb import running
from ...plugins.types import AttentionImpl, CommunicatorImpl, LayerImpl, answered
from ...text import quote
from .lookups import named

ClassImpl = AttentionImpl | CommunicatorImpl | LayerImpl
"""An implementation that names a class."""


def _noted(what: str, op: str, impl_id: str) -> AbstractContextManager[None]:
    """While the block runs, this part of an implementation is noted for the next process."""
    owner = get_default_manager().registry.snapshot().owners.get((op, impl_id))
    return running(f"{what} of {op}={impl_id}" + (f" of {owner.name}" if owner else ""))


def refusal_of(impl: ClassImpl, op: str, request: object) -> str | None:
    """Why a class does not take what vLLM asks; None when it does."""
    supports: Callable[[Any], object] | None = impl.supports
    if supports is None:
        return None
    with _noted("the supports", op, impl.impl_id):
        verdict = answered("its supports", lambda: supports(request))
    return None if verdict is True else verdict


def refusals(
    op: str,
    request: object,
    whose: str,
    ask: Callable[[ClassImpl, str, object], str | None] = refusal_of,
    among: Callable[[ClassImpl], bool] = lambda impl: True,
) -> dict[tuple[str, str], str]:
    """(op, impl id) -> why an installed class does not take an engine; nothing without a request.

    One that is not available has a better reason, and may not be asked.

    Args:
        op: what the classes are registered for.
        request: what vLLM asks of them.
        whose: what is refused, as `this engine`.
        ask: (a class, op, request) -> why the class does not take it, or None.
        among: whether a class is asked at all.
    """
    if request is None:
        return {}
    impls = get_default_manager().registry.snapshot().impls_by_op.get(op, ())
    return {
        (op, impl.impl_id): f"refuses {whose}: {reason}"
        for impl in impls
        if isinstance(impl, ClassImpl)
        and among(impl)
        and impl.is_available()
        and (reason := ask(impl, op, request)) is not None
    }


def class_of(
    impl: ClassImpl, op: str, request: object, problem: Callable[[str, Any], str]
) -> tuple[str, Any, str]:
    """Import a class: (what there is of its path, the class or None, why it cannot be used).

    Args:
        impl, op: the implementation, and what it is registered for.
        request: what its path is asked with, where that is a function.
        problem: (path, class) -> why such a class cannot be used, or nothing.
    """
    path = ""
    try:
        with _noted("the class", op, impl.impl_id):
            given: Any = impl.class_path
            path = given if isinstance(given, str) else given(request)
            cls = named(path)
            return path, cls, problem(path, cls)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a plugin's module raises costs the plugin alone
        return path, None, f"its class {path or 'path'} failed: {quote(error)}"
