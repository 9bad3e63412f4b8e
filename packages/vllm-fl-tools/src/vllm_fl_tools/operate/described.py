"""An engine that nobody has started: what it would run, before it verifies anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Described:
    """What an engine would run.

    Args:
        facts: what its configuration says.
        plan: its plan. Verification may still take somebody out.
        layers: op -> class of vLLM's -> how many layers of it the model has.
        aside: why vLLM runs without vllm-fl, with an empty plan; empty where it does not.
        differs: what differs from the lock that its settings name, a sentence each.
        unasked: why vLLM was not asked; what it alone knows is missing then.
        config: vLLM's configuration of it; None where vLLM was not asked.
    """

    facts: EngineFacts
    plan: Plan
    layers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    aside: str = ""
    differs: tuple[str, ...] = ()
    unasked: str = ""
    config: VllmConfig | None = None

    @property
    def ends(self) -> list[str]:
        """Why the start would end before it verifies anything."""
        found = [entry.unmet for entry in self.plan.entries.values()]
        table = self.facts.settings.tuned
        if table is not None and table.unused and self.plan.strict:
            found.append(f"strict mode, and {table.reason}")
        return [*filter(None, found)]

    @property
    def has_model(self) -> bool:
        """Whether it is known which model it serves; of any other, every op is planned."""
        return self.facts.dtype is not None
