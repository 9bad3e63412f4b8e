"""Where vLLM runs each op: one module per op, named after it, with its `BINDING`.

Imports no vLLM, so that the command line and the documentation may read it anywhere.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from ...contracts.binding import Binding

__all__ = ["bindings"]


@cache
def bindings() -> Mapping[str, Binding]:
    """Core's own bindings by op, read-only. Those that plugins bring are not among them."""
    found = {
        module.name: import_module(f"{__name__}.{module.name}").BINDING
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_")
    }
    return MappingProxyType(dict(sorted(found.items())))
