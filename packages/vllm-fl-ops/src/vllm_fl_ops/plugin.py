"""The plugin by which the ops come: through the hook of anybody's ops."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from vllm_fl import hookimpl
from vllm_fl.contracts.binding import Contract

from . import bindings


@hookimpl
def contracts() -> list[Contract]:
    """Every op that has a module of its name in `contracts` and in `bindings`."""
    ops = [found.name for found in iter_modules(bindings.__path__) if found.name[0] != "_"]
    return [
        Contract(import_module(f"{__package__}.contracts.{op}").SPEC, f"{bindings.__name__}.{op}")
        for op in ops
    ]
