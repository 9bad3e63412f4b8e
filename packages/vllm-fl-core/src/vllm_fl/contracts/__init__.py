"""The parts of a contract. Backends and vllm-fl-ops provide contracts by the hook `contracts`."""

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
]
