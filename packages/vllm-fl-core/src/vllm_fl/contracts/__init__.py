"""The contracts: one module per op, each with `SPEC`. A new module here is a new op."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from .outputs import Exact, ExpertBlocks, QuantisedPair, Routing, Within
from .spec import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant

__all__ = [
    "BadInput",
    "Exact",
    "ExpertBlocks",
    "ModelSizes",
    "OpSpec",
    "QuantisedPair",
    "Routing",
    "Sample",
    "Tolerance",
    "Variant",
    "Within",
    "contracts",
]


@cache
def contracts() -> Mapping[str, OpSpec]:
    """Every contract by op name, read-only. Imports no torch."""
    found: dict[str, OpSpec] = {}
    for module in pkgutil.iter_modules(__path__):
        spec = getattr(import_module(f"{__name__}.{module.name}"), "SPEC", None)
        if spec is not None:
            found[spec.name] = spec
    return MappingProxyType(dict(sorted(found.items())))
