"""Implementations that are classes of plugins, passed to vLLM by class path."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...dispatch import get_default_manager
from ...plugins.answers import answered
from ...plugins.breadcrumb import noting
from ...plugins.types import AttentionImpl, CommunicatorImpl, KernelImpl, LayerImpl
from ...text import quote
from .lookups import import_object

ClassImpl = AttentionImpl | CommunicatorImpl | LayerImpl


def _noted(what: str, op: str, impl_id: str) -> AbstractContextManager[None]:
    """Inside the block, keep a note for the next process that this plugin code is running."""
    owner = get_default_manager().registry.snapshot().owners.get((op, impl_id))
    return noting(f"{what} of {op}={impl_id}" + (f" of {owner.name}" if owner else ""))


def class_refusal(impl: ClassImpl, op: str, request: object) -> str | None:
    supports: Callable[[Any], object] | None = impl.supports
    if supports is None:
        return None
    with _noted("the supports", op, impl.impl_id):
        verdict = answered("its supports", lambda: supports(request))
    return None if verdict is True else verdict


def class_refusals(
    op: str,
    request: object,
    requester: str,
    ask: Callable[[ClassImpl, str, object], str | None] = class_refusal,
    among: Callable[[ClassImpl], bool] = lambda impl: True,
) -> dict[tuple[str, str], str]:
    """Return (op, impl id) -> why an installed class does not support a request.

    Unavailable classes are skipped, because they already have a reason and must not be called.

    Args:
        request: the request for `supports`. If it is None, the result is empty.
        requester: the subject of the request in the reason, such as `this engine`.
        ask: (class, op, request) -> the reason, or None.
    """
    if request is None:
        return {}
    impls = get_default_manager().registry.snapshot().impls_by_op.get(op, ())
    return {
        (op, impl.impl_id): f"does not support {requester}: {reason}"
        for impl in impls
        if isinstance(impl, ClassImpl)
        and among(impl)
        and impl.is_available()
        and (reason := ask(impl, op, request)) is not None
    }


def class_of(
    impl: ClassImpl | KernelImpl, op: str, request: object, problem: Callable[[str, Any], str]
) -> tuple[str, Any, str]:
    """Import a class. Return its path, the class or None, and why it cannot be used or empty.

    Args:
        problem: (path, class) -> why the class cannot be used, or empty.
    """
    path = ""
    try:
        with _noted("the class", op, impl.impl_id):
            given: Any = impl.class_path
            path = given if isinstance(given, str) else given(request)
            cls = import_object(path)
            return path, cls, problem(path, cls)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything, including SystemExit
        return path, None, f"its class {path or 'path'} failed: {quote(error)}"
