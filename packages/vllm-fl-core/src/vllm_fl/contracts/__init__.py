"""What a contract is. The contracts themselves come from distributions, by the hook `contracts`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
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

OPS = "vllm-fl-ops"
"""The distribution of this project's ops."""


@cache
def contracts() -> Mapping[str, OpSpec]:
    """The contracts of vllm-fl-ops by op name, read-only; empty if it is not installed.

    Imports no torch. `vllm_fl.plugins.registry.known_contracts` has other distributions' ops, too.
    """
    from importlib_metadata import entry_points  # slow to import

    found = entry_points(group="vllm_fl.contracts", module="vllm_fl_ops.plugin")
    specs = [contract.spec for plugin in found for contract in plugin.load().contracts()]
    return MappingProxyType({spec.name: spec for spec in specs})
