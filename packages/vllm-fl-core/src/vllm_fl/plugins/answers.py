"""Verdicts of third-party code, and checks of the values that it provides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from ..text import clean, quote

Availability = Literal[True] | str
"""True, or the reason why not."""


def check_path(who: str, which: str, path: object) -> None:
    if not isinstance(path, str) or "." not in path.strip("."):
        raise ValueError(f"{who}: {which} must be 'module.Class', got {path!r}")


def parameters_of(fn: Callable[..., Any]) -> tuple[inspect.Parameter, ...] | None:
    """Return the parameters of `fn`; None for a builtin without a signature."""
    try:
        return tuple(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def answered(who: str, ask: Callable[[], object]) -> Availability:
    """Return the verdict of third-party code: True, or why not. An exception becomes a reason with
    the subject `who`, such as `its supports`. `ask` returns the verdict."""
    try:
        verdict = ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{who} raised {quote(error)}"
    if verdict is True:
        return True
    if isinstance(verdict, str) and verdict:
        return clean(verdict)
    return f"{who} returned neither True nor a reason"


def older_probe(fn: object) -> Callable[[], Availability] | None:
    """Return the probe of the older form: on the function, or on the backend of a bound method."""
    probe = getattr(fn, "_is_available", None)
    probe = probe or getattr(getattr(fn, "__self__", None), "is_available", None)
    return probe if callable(probe) else None
