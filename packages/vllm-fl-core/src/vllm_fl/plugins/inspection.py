"""The arguments and results of hooks: the protocol `Engine` and plain values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

FAILED, LACKED, REJECTED = "FL410", "FL411", "FL412"
"""Codes of objections."""

REFUSES = "it refuses every call of this model"
"""The beginning of a REJECTED reason, for a correct implementation that supports no call of the
model."""

Key = tuple[str, str]
"""(op, impl id)."""


class Moment(enum.StrEnum):
    """The moments at which an engine calls `inspect_plan`."""

    GROUPED = "grouped"
    """vLLM's groups of ranks exist. If a communicator is disabled, its group gets the next
    candidate."""
    PLANNED = "planned"
    """The plan exists, and nothing is bound to it. Repeated after LOADED or CACHED if an
    implementation was disabled there, with the model in memory."""
    LOADED = "loaded"
    """The model is bound to the plan and has its weights. Nothing is compiled."""
    CACHED = "cached"
    """The KV cache is allocated. No graph is captured; in compiled mode the model is compiled."""
    UPDATED = "updated"
    """Weights were replaced in a running engine, or a user requested a check."""


@dataclass(frozen=True)
class Objection:
    """The reason why an implementation must not run.

    Args:
        code: the code of the warning: FL410 for a failure, FL411 if the implementation is not
            installed on a rank, FL412 if it is correct and must not run for another reason.
        reason: one sentence without a full stop.
        ends_strict: whether it fails the startup in strict mode.
    """

    code: str
    reason: str
    ends_strict: bool = True


@dataclass(frozen=True)
class GroupFacts:
    """One of vLLM's groups of ranks.

    Args:
        name: vLLM's name of the group.
        rank: the rank of this process in the group.
        size: the number of ranks.
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
    """One check of a communicator, run by all ranks of the group at the same time.

    Args:
        what: the subject of the check, for the message.
        run: returns the fault as one sentence, or None; an exception is a fault too.
    """

    what: str
    run: Callable[[], str | None]


@dataclass(frozen=True)
class WorkerContext:
    """The argument of a plugin's `worker_start`.

    Args:
        settings: the engine's effective settings (`vllm_fl.settings.schema.Settings`).
        device: the worker's `torch.device`.
        dtype: the model's `torch.dtype`.
        rank: this worker's rank, 0 for the first.
        vllm_config: vLLM's configuration, for everything else.
        wants_invariance: the setting by which only implementations that were measured as
            batch-invariant may run, vLLM's included, as the user wrote it; empty if none requires
            that. With VLLM_BATCH_INVARIANT=1 vLLM replaces PyTorch operators for it.
    """

    settings: Any
    device: Any
    dtype: Any
    rank: int
    vllm_config: Any
    wants_invariance: str = ""


@dataclass(frozen=True)
class WorkerReport:
    """The result of a plugin's `worker_start`.

    Args:
        lines: for the log, one sentence each.
        facts: JSON-able values. They enter the plan's digest, so compiled code is not reused when
            they change.
    """

    lines: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Finding:
    """A problem reported by `vllm-fl doctor`.

    Args:
        check: the check that found it, for programs (`vllm-plugins`).
        what: the problem, one sentence.
        why: its consequence or its cause.
        todo: the fix: a command that a shell runs unchanged.
    """

    check: str
    what: str
    why: str
    todo: str


class Engine(Protocol):
    """One engine in this process: its data, and a few methods.

    A plugin may change only `remarks`, `unused`, and its entry of `state`.
    """

    plan: Any
    """The current plan (`vllm_fl.engine.plan.Plan`). Disabling an implementation changes it."""

    facts: Any
    """The configuration and the settings of the engine (`vllm_fl.engine.facts.EngineFacts`)."""

    rank: int
    """The number of this worker within the engine."""

    device: Any
    """The worker's `torch.device`."""

    @property
    def config(self) -> Any:
        """vLLM's configuration (`VllmConfig`)."""

    @property
    def runner(self) -> Any:
        """The model runner of the worker, or None."""

    @property
    def models(self) -> Mapping[str, Any]:
        """The model and its draft model (`torch.nn.Module`), by the prefix of their layers' names.
        Empty before `Moment.LOADED`."""

    groups: Any
    """The communicators of the groups of ranks; None if vLLM creates them."""

    @property
    def disabled(self) -> Mapping[Key, Any]:
        """(op, impl id) -> why it is disabled on all ranks, with `code`, `rank` and `why`."""

    joins: bool
    """Whether this rank joins a running engine: `gather` then returns only its own value."""

    unused: dict[str, str]
    """Planned op -> why the model does not call it."""

    remarks: dict[Moment, list[str]]
    """Moment -> remarks on it, for the log and the report."""

    state: dict[object, Any]
    """Owner -> its data about this engine. Use an object of your plugin as the key."""

    def gather(self, what: str, mine: T) -> list[T]:
        """Exchange a value with all ranks, which must all call this in the same order.

        If a rank fails before its exchange, all ranks raise.

        Args:
            what: the purpose, for the log and an error, such as `compare the seeds`.
            mine: this rank's value; it is pickled.

        Returns:
            The value of every rank, in the order of the ranks.
        """

    def on_exit(self, f: Callable[[], object]) -> None:
        """Call `f` when the engine ends or its startup fails, the latest `f` first."""

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which calls of this thread are calls of this engine, and use its
        plan."""

    def on_serving(self, f: Callable[[], object]) -> None:
        """Call `f` just before the engine takes requests."""
