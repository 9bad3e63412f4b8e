"""The values that the hooks of an engine's startup take and return."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Check", "GroupFacts", "Key", "Moment", "Objection"]

FAILED, LACKED, REJECTED = "FL410", "FL411", "FL412"
"""The codes of objections."""

Key = tuple[str, str]
"""(op, impl id)."""


class Moment(enum.StrEnum):
    """When an engine asks whether something must not serve."""

    GROUPED = "grouped"
    """vLLM's groups of ranks exist. Disabling a communicator gives its group the next one."""
    PLANNED = "planned"
    """A plan is made and nothing is bound to it. Comes again after LOADED or CACHED if something
    was disabled there; the model is in memory then."""
    LOADED = "loaded"
    """The model is bound to the plan and has its weights. Nothing is compiled."""
    CACHED = "cached"
    """The KV cache is allocated. Nothing is captured; in compiled mode the model is compiled."""
    UPDATED = "updated"
    """Weights were replaced while the engine serves, or somebody asked for a check."""


@dataclass(frozen=True)
class Objection:
    """The reason why an implementation must not serve.

    Args:
        code: the code of the warning: FL410 for a failure, FL411 if a rank lacks it, FL412 for one
            that is right and must not serve all the same.
        reason: one sentence without a full stop.
        ends_strict: whether strict mode ends the startup for it.
    """

    code: str
    reason: str
    ends_strict: bool = True


@dataclass(frozen=True)
class GroupFacts:
    """One of vLLM's groups of ranks.

    Args:
        name: vLLM's name of the group.
        rank: this rank's place in it.
        size: how many ranks it has.
        device: the `torch.device` of its tensors.
        dtype: the model's `torch.dtype`.
    """

    name: str
    rank: int
    size: int
    device: Any
    dtype: Any


@dataclass(frozen=True)
class Check:
    """One check of a communicator, which all ranks of the group run at the same time.

    Args:
        what: what it checks, for the message.
        run: returns the fault as one sentence, or nothing; what it raises is a fault too.
    """

    what: str
    run: Callable[[], str | None]
