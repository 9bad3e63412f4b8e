"""Attention backends: implementations that name a class instead of computing something."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .types import (
    AttentionImpl,
    AttentionRequest,
    CommunicatorImpl,
    LayerImpl,
    OpImpl,
    answered,
    parameters_of,
)

ATTENTION = "attention_backend"
"""The op under which attention backends are registered, resolved and planned."""


def refusal(impl: AttentionImpl | CommunicatorImpl | LayerImpl, request: object) -> str | None:
    """Why `impl` does not take what vLLM asks of its kind; None when it does."""
    supports: Callable[[Any], object] | None = impl.supports
    if supports is None:
        return None
    verdict = answered("its supports", lambda: supports(request))
    return None if verdict is True else verdict


def class_path_for(impl: AttentionImpl | CommunicatorImpl | LayerImpl, request: Any) -> str:
    """The path of the class that `impl` names for `request`."""
    path = impl.class_path
    return path if isinstance(path, str) else path(request)


def from_older_form(impl: OpImpl) -> AttentionImpl:
    """The older form, `fn(use_mla, use_sparse) -> class path` under an OpImpl, as it is now."""
    parameters = parameters_of(impl.fn) or ()
    names = {p.name for p in parameters}
    takes_all = not parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def class_path(request: AttentionRequest) -> str:
        asked = {"use_mla": request.use_mla, "use_sparse": request.use_sparse}
        path: Any = impl.fn(**{k: v for k, v in asked.items() if takes_all or k in names})
        return str(path)

    def available() -> Any:
        if impl.needs_layer:
            return "it takes a layer first (self), and is asked before there is one"
        return impl.availability()

    return AttentionImpl(
        impl.impl_id, class_path, impl.kind, impl.vendor, impl.priority, available=available
    )
