"""Tables of release 0.2.0: what they call things, and what of them still holds.

They may act until the release after the next: this module, and what asks it, goes with 0.4.0.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType

from ..contracts import OpSpec
from .digest import CORE, digest

HOLDS = MappingProxyType({CORE: "0.2.0", "vllm-fl-flaggems": "0.2.0"})
"""Distribution -> the release of it with which a table was measured that still holds.

Of others of that time the code of each kernel is what it was, to the byte. vllm-fl-flaggems reads
its settings in another way, and its kernels are the same but for products, which are faster.
"""

CONTRACTS: Mapping[str, Sequence[str]] = MappingProxyType(
    json.loads((files(__package__) / "of_0_2_0.json").read_text("utf-8"))
)
"""Op -> the digest of its contract in such tables; `contract_digest` of that same contract.

A contract that means something else than in 0.2.0 has no entry: such tables do not hold for it. One
that only promises more of inputs which no measurement has (NaN under a weight of 0, an id of -1, a
row of equal numbers) has one.
"""


def was_measured(spec: OpSpec, told: str, now: str) -> bool:
    """Whether a table of 0.2.0 was measured by a contract.

    Args:
        spec: the contract.
        told: its digest, as the table has it.
        now: its digest.
    """
    if spec.name in CONTRACTS:
        return [told, now] == CONTRACTS[spec.name]
    return told == _of_source(spec)


def _of_source(spec: OpSpec) -> str:
    """As 0.2.0 had it: a hash of the source of the contract's module."""
    module = inspect.getmodule(spec.oracle)
    try:
        source = inspect.getsource(module) if module is not None else ""
    except OSError:  # a contract that was made at a prompt
        source = ""
    return digest({"op": spec.name, "source": source})
