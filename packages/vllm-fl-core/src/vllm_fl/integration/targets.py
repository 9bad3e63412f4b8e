"""The targets of each op, from the bindings of the loaded contracts. This module does not import
vLLM, because the command line and the documentation use it without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..contracts.binding import AttentionTarget, Binding, Target
from ..dispatch import get_default_manager
from ..plugins.snapshot import RegistrySnapshot
from ..plugins.types import ATTENTION, KERNEL_OPS, BackendImplKind, OpImpl

if TYPE_CHECKING:
    from ..engine.facts import EngineFacts
    from ..engine.plan import Plan

P = TypeVar("P", bound=Target)

ATTENTION_LAYERS = Binding(
    targets=(AttentionTarget(),),
    not_reached=(
        "layers with an explicitly set backend: --attention-backend, a backend per kind of layer, "
        "a model's or a drafter's own",
        "attention that does not query the platform: Mamba and linear attention, vision encoders, "
        "models that provide their own backend",
    ),
)

QUANTISED_LAYERS = Binding(
    not_reached=(
        "layers for which vLLM's arguments select a class: --linear-backend, --moe-backend",
        "layers for which vLLM does not read its list: with VLLM_BATCH_INVARIANT, NVFP4 with "
        "16-bit activations, batched MXFP8 products",
        "layers without a list in vLLM: torchao, bitsandbytes, FP-Quant, Humming's own "
        "configuration, Quark W4A8; experts with 4-bit weights and 8-bit activations; layers that "
        "are not quantised",
    )
)


def all_bindings(snapshot: RegistrySnapshot) -> Mapping[str, Binding]:
    """Return op -> its binding, including the attention backend and quantised layers."""
    quantised = dict.fromkeys(KERNEL_OPS, QUANTISED_LAYERS)
    return {ATTENTION: ATTENTION_LAYERS, **quantised, **snapshot.bindings}


def installed_bindings() -> Mapping[str, Binding]:
    return all_bindings(get_default_manager().registry.snapshot())


def targets(table: Mapping[str, Binding], kind: type[P]) -> list[tuple[str, P]]:
    return [
        (op, target)
        for op, binding in table.items()
        for target in binding.targets
        if isinstance(target, kind)
    ]


def planned_targets(plan: Plan, kind: type[P]) -> list[tuple[str, P]]:
    return [each for each in targets(installed_bindings(), kind) if not plan.is_stock(each[0])]


def without_layers(plan: Plan, has: Collection[str]) -> set[str]:
    """Return the planned ops that only layers call, if the model has no such layer. Ops with other
    targets are omitted if these may be called without a layer: if their binding has a condition on
    the model (`when`), or if a planned op calls operators (`calls_operators`). `has` are the ops
    that the model has layers for; empty if unknown."""
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
    """Return vLLM's implementation with the contract's parameters, as the last candidate of a
    plan."""
    if native is None:
        return None
    kind = BackendImplKind.REFERENCE
    return OpImpl(op, "stock.vllm", kind, native, consumes=consumes, traceable=traceable)


def planned_for_nothing(plan: Plan, facts: EngineFacts) -> dict[str, str]:
    """Return op -> why the model does not call it, for ops with planned implementations."""
    found = dict.fromkeys(without_layers(plan, facts.provided), "this model has no layer for it")
    named = "selected in settings, but this model has no target for it"
    found |= dict.fromkeys(facts.absent, named)  # planned only because of settings
    return {op: found[op] for op, entry in plan.entries.items() if entry.is_planned and op in found}
