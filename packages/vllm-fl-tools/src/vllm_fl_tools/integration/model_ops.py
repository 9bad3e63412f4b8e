"""Finds the ops that a model has from the layers that vLLM builds for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, GraphTarget

if TYPE_CHECKING:
    from ..operate.described import Described


def absent_ops(engine: Described, bindings: Mapping[str, Binding]) -> frozenset[str]:
    """Return the ops that the model does not have; empty if its layers are unknown.

    These are the ops of layers that the model does not build, and ops that fuse such an op. They do
    not include the activation that the model's experts call (`Binding.calls_operators`).
    """
    absent, layers = engine.facts.absent, engine.layers
    is_called = any(b.calls_operators and op not in absent for op, b in bindings.items())

    def is_without(op: str, binding: Binding) -> bool:
        targets = binding.targets
        has_layers = any(target.needs_layer for target in targets)
        is_named = any(target.called_by_name for target in targets)
        of_experts = is_called and is_named and op.startswith(_activation(engine))
        return has_layers and op not in layers and not of_experts

    found = frozenset(op for op, b in bindings.items() if layers and is_without(op, b))
    return found | {op for op, binding in bindings.items() if found & taken_in(binding)}


def taken_in(binding: Binding) -> frozenset[str]:
    """Return the ops that an op fuses. If the op is planned, they do not occur in graphs."""
    targets = (target for target in binding.targets if isinstance(target, GraphTarget))
    return frozenset(part for target in targets for part in target.parts)


def _activation(engine: Described) -> str:
    """Return the prefix of the ops of the model's activation; empty if unknown."""
    config = engine.config.model_config.hf_text_config if engine.config else None
    return str(getattr(config, "hidden_act", None) or "").partition("_")[0]
