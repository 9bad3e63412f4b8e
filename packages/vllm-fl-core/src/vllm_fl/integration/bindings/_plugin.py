"""The plugin by which the ops of this folder come: through the hook of anybody's ops."""

from __future__ import annotations

from ...contracts import contracts as known
from ...contracts.binding import Contract
from ...plugins.hookspecs import hookimpl
from . import bindings


@hookimpl
def contracts() -> list[Contract]:
    """Every contract of this distribution, with the module of its binding."""
    return [
        Contract(spec, f"{__package__}.{op}" if op in bindings() else None)
        for op, spec in known().items()
    ]
