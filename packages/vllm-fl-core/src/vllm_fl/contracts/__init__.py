"""What a contract is. The contracts themselves come from distributions, by the hook `contracts`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

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

OPS = "vllm-fl-ops"
PACKAGE = "vllm_fl_ops"
"""The distribution that brings the ops of this project, and its package."""


class _Former:
    """Finds the modules that ops had here until 0.3, for code that imports them as before.

    That distribution has them, under the same names; this goes with 0.4.
    """

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name.rpartition(".")[0] != __name__ or find_spec(PACKAGE) is None:
            return None
        there = find_spec(f"{PACKAGE}.contracts.{name.rpartition('.')[2]}")
        return ModuleSpec(name, self) if there else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """A new one, which makes place for the one that is there."""

    def exec_module(self, module: ModuleType) -> None:
        here = module.__name__
        sys.modules[here] = import_module(f"{PACKAGE}.contracts.{here.rpartition('.')[2]}")


sys.meta_path.append(_Former())


@cache
def contracts() -> Mapping[str, OpSpec]:
    """The contracts of vllm-fl-ops by op name, read-only; none where it is not installed.

    Imports no torch. `vllm_fl.plugins.registry.known_contracts` has other distributions' ops, too.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import

    try:
        found = distribution(OPS).entry_points.select(group="vllm_fl.contracts")
    except PackageNotFoundError:
        return MappingProxyType({})
    brought = [contract.spec for plugin in found for contract in plugin.load().contracts()]
    return MappingProxyType({spec.name: spec for spec in brought})
