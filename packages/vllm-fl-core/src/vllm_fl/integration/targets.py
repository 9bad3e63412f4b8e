"""Which targets in vLLM are an op's, by the bindings of the contracts that this process has loaded.

Imports no vLLM, so that the command line and the documentation may read it anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..contracts.binding import AttentionTarget, Binding, Target
from ..dispatch import get_default_manager
from ..plugins.snapshot import RegistrySnapshot
from ..plugins.types import ATTENTION, BackendImplKind, OpImpl

if TYPE_CHECKING:
    from ..engine.facts import EngineFacts
    from ..engine.plan import Plan

P = TypeVar("P", bound=Target)

ATTENTION_LAYERS = Binding(
    targets=(AttentionTarget(),),
    not_reached=(
        "layers for which vLLM is told a backend: --attention-backend, a backend per kind of "
        "layer, a model's or a drafter's own",
        "attention that asks no platform: Mamba and linear attention, vision encoders, models "
        "that bring their own backend",
    ),
)
"""Where vLLM asks for an attention backend, which has no contract."""


def all_bindings(snapshot: RegistrySnapshot) -> Mapping[str, Binding]:
    """Every binding by op: attention's, and those that came with contracts."""
    return {ATTENTION: ATTENTION_LAYERS, **snapshot.bindings}


def installed_bindings() -> Mapping[str, Binding]:
    """Every binding of this process: of the contracts that it has loaded, and attention's."""
    return all_bindings(get_default_manager().registry.snapshot())


def targets(table: Mapping[str, Binding], kind: type[P]) -> list[tuple[str, P]]:
    """(op, target) for every place of one kind, in the order of the table."""
    return [
        (op, target)
        for op, binding in table.items()
        for target in binding.targets
        if isinstance(target, kind)
    ]


def planned(plan: Plan, kind: type[P]) -> list[tuple[str, P]]:
    """(op, target) for every place of one kind of this process whose op `plan` does not leave."""
    return [each for each in targets(installed_bindings(), kind) if not plan.is_stock(each[0])]


def without_layers(plan: Plan, has: Collection[str]) -> set[str]:
    """The planned ops that vLLM has layers for, of which a model has none.

    Code without a layer may reach one, too: where the op's binding says of which models it is, or
    where an op of the model calls operators.

    Args:
        plan: an engine's plan.
        has: the ops that its model has layers of; none where they are not known.
    """
    if not has:
        return set()
    table = installed_bindings()
    of_planned = {op: table.get(op, Binding()) for op in plan.entries}
    reaches = any(binding.calls_operators for binding in of_planned.values())

    def only_layers(binding: Binding) -> bool:
        others = [target for target in binding.targets if not target.needs_layer]
        has_layers = len(others) < len(binding.targets)
        return has_layers and not (others and (binding.when or reaches))

    return {op for op, binding in of_planned.items() if only_layers(binding)} - {*has}


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


def planned_for_nothing(plan: Plan, facts: EngineFacts) -> dict[str, str]:
    """Op -> why no call of it is to be expected, by what the model is made of."""
    found = dict.fromkeys(without_layers(plan, facts.provided), "this model has no layer of it")
    named = "the settings name it, and this model has no place for it here"
    found |= dict.fromkeys(facts.absent, named)  # those that only the user's settings plan
    return {op: found[op] for op, entry in plan.entries.items() if entry.impls and op in found}
