"""What is registered at one moment: implementations and contracts, each with its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..contracts import OpSpec
from ..contracts.binding import Binding
from .plugin import Owner
from .types import Impl, LayerImpl


@dataclass(frozen=True)
class RegistrySnapshot:
    """The registry at one moment, read-only.

    Args:
        impls_by_op: op -> its implementations, ordered by impl id. Attention backends stand under
            `attention_backend`, communicators under `communicator`, whole layers under the name of
            vLLM's class.
        owners: (op, impl id) -> who brought it.
        contracts: every op's contract by name.
        bindings: op -> its targets in vLLM.
        authors: op -> who brought its contract and its binding.
    """

    impls_by_op: Mapping[str, tuple[Impl, ...]]
    owners: Mapping[tuple[str, str], Owner]
    contracts: Mapping[str, OpSpec] = field(default_factory=dict)
    bindings: Mapping[str, Binding] = field(default_factory=dict)
    authors: Mapping[str, Owner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, table in list(vars(self).items()):
            object.__setattr__(self, name, MappingProxyType({**table}))

    @property
    def ops(self) -> tuple[str, ...]:
        """Every op that has a contract or an implementation, in order of their names."""
        return tuple(sorted({*self.contracts, *self.impls_by_op}))

    @property
    def layers(self) -> tuple[str, ...]:
        """The whole layers of vLLM's that have an implementation."""
        return tuple(op for op, i in self.impls_by_op.items() if isinstance(i[0], LayerImpl))

    @property
    def groups(self) -> dict[str, list[str]]:
        """Group -> the ops of it, for the groups that contracts name."""
        groups: dict[str, list[str]] = {}
        for op, spec in self.contracts.items():
            if spec.group:
                groups.setdefault(spec.group, []).append(op)
        return groups


EMPTY = RegistrySnapshot({}, {})
"""A registry into which nothing was loaded."""
