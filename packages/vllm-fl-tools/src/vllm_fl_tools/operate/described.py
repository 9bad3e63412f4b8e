"""Description of an engine that has not started, with its unverified plan."""

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
    """The plan that an engine would start with.

    Args:
        facts: facts from the engine's configuration.
        plan: the engine's plan. Verification may still disable implementations.
        layers: op -> class of vLLM -> number of such layers in the model.
        aside: why the engine runs stock vLLM, with an empty plan; empty if vllm-fl is active.
        differs: differences from the lock file of the settings, one sentence each.
        unasked: why vLLM could not be queried; the description is then incomplete.
        config: vLLM's configuration; None if vLLM could not be queried.
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
        """The reasons why startup would fail before verification."""
        found = [entry.unmet for entry in self.plan.entries.values()]
        table = self.facts.settings.tuned
        if table is not None and table.unused and self.plan.strict:
            found.append(f"strict mode, and {table.reason}")
        return [*filter(None, found)]

    @property
    def has_model(self) -> bool:
        """Whether the model is known. Otherwise every op is planned."""
        return self.facts.dtype is not None
