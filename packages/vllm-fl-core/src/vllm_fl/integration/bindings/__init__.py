"""Which places in vLLM are an op's: one module per op, named after it, with its `BINDING`.

Imports no vLLM, so that the command line and the documentation may read it anywhere.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

from ...contracts.binding import (
    AttentionPlace,
    Binding,
    FunctionPlace,
    FusionPlace,
    GraphPlace,
    IrPlace,
    LayerPlace,
    OperatorPlace,
)
from ...dispatch import get_default_manager
from ...plugins.registry import RegistrySnapshot
from ...plugins.types import BackendImplKind, OpImpl

__all__ = ["all_bindings", "bindings", "installed_bindings", "places", "stock_form"]

P = TypeVar(
    "P",
    LayerPlace,
    OperatorPlace,
    FunctionPlace,
    IrPlace,
    AttentionPlace,
    FusionPlace,
    GraphPlace,
)


@cache
def bindings() -> Mapping[str, Binding]:
    """Core's own bindings by op, read-only. Those that plugins bring are not among them."""
    found = {
        module.name: import_module(f"{__name__}.{module.name}").BINDING
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_")
    }
    return MappingProxyType(dict(sorted(found.items())))


def all_bindings(snapshot: RegistrySnapshot) -> Mapping[str, Binding]:
    """Every binding by op: core's own, and those that plugins brought."""
    return {**bindings(), **snapshot.bindings}


def installed_bindings() -> Mapping[str, Binding]:
    """Every binding of this process: core's own, and those of the plugins that it has loaded."""
    return all_bindings(get_default_manager().registry.snapshot())


def places(table: Mapping[str, Binding], kind: type[P]) -> list[tuple[str, P]]:
    """(op, place) for every place of one kind, in the order of the table."""
    return [
        (op, place)
        for op, binding in table.items()
        for place in binding.places
        if isinstance(place, kind)
    ]


def stock_form(
    op: str,
    native: Callable[..., Any] | None,
    consumes: frozenset[str] = frozenset(),
    *,
    traceable: bool = True,
) -> OpImpl | None:
    """vLLM's own form of an op, by the contract's parameters: the last of a plan's candidates."""
    if native is None:
        return None
    kind = BackendImplKind.REFERENCE
    return OpImpl(op, "stock.vllm", kind, native, consumes=consumes, traceable=traceable)
