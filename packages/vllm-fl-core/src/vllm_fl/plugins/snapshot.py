"""The content of the registry at one moment."""

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
    """Implementations and contracts at one moment; read-only.

    Args:
        impls_by_op: op -> its implementations, ordered by impl id. The op is `attention_backend`,
            `communicator`, or vLLM's class name for a whole layer.
        owners: (op, impl id) -> the owner of the implementation.
        authors: op -> the owner of its contract and its binding.
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
        return tuple(sorted({*self.contracts, *self.impls_by_op}))

    @property
    def layers(self) -> tuple[str, ...]:
        """The whole vLLM layers that have an implementation."""
        return tuple(op for op, i in self.impls_by_op.items() if isinstance(i[0], LayerImpl))

    @property
    def groups(self) -> dict[str, list[str]]:
        """Group -> its ops, for the groups in contracts."""
        groups: dict[str, list[str]] = {}
        for op, spec in self.contracts.items():
            if spec.group:
                groups.setdefault(spec.group, []).append(op)
        return groups


EMPTY = RegistrySnapshot({}, {})
