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

REFUSES = "it supports no call of this model"
"""The beginning of a REJECTED reason, if a correct implementation supports no call of the model."""

VERIFIED_BEFORE = "verified before"
"""The remark of a verifier at PLANNED, if an earlier startup has verified all implementations."""

Key = tuple[str, str]
"""(op, impl id)."""


class Moment(enum.StrEnum):
    """Moments when `inspect_plan` is called."""

    GROUPED = "grouped"
    """vLLM's groups of ranks exist. If a communicator is disabled, its group gets the next
    candidate."""
    PLANNED = "planned"
    """The plan exists, but vLLM does not use it yet. The moment repeats, with the model in memory,
    if an implementation was disabled at LOADED or CACHED."""
    LOADED = "loaded"
    """The model uses the plan and has its weights. Nothing is compiled."""
    CACHED = "cached"
    """The KV cache is allocated. No graph is captured. In compiled mode the model is compiled."""
    UPDATED = "updated"
    """Weights were replaced in a running engine, or a user requested a check."""


@dataclass(frozen=True)
class Objection:
    """The reason why an implementation must not run.

    Args:
        code: the code of the warning: FL410 for a failure, FL411 if the implementation is not
            installed on a rank, FL412 for a correct implementation that is rejected.
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
        rank: this process's rank in the group.
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
        what: the subject, for the message.
        run: returns the fault as one sentence, or None. An exception is a fault.
    """

    what: str
    run: Callable[[], str | None]


@dataclass(frozen=True)
class WorkerContext:
    """The argument of the hook `worker_start`.

    Args:
        settings: the engine's effective settings (`vllm_fl.settings.schema.Settings`).
        device: the worker's `torch.device`.
        dtype: the model's `torch.dtype`.
        rank: this worker's rank.
        vllm_config: vLLM's configuration, for everything else.
        wants_invariance: the setting, as the user wrote it, that requires all implementations, and
            also vLLM's code, to be measured as batch-invariant. It is empty without such a setting.
            With VLLM_BATCH_INVARIANT=1 vLLM replaces PyTorch operators.
    """

    settings: Any
    device: Any
    dtype: Any
    rank: int
    vllm_config: Any
    wants_invariance: str = ""


@dataclass(frozen=True)
class WorkerReport:
    """The result of the hook `worker_start`.

    Args:
        lines: sentences for the log.
        facts: JSON-able values for the plan's digest. Compiled code is not reused when they change.
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
        todo: a shell command that fixes it.
    """

    check: str
    what: str
    why: str
    todo: str


class Engine(Protocol):
    """One engine in this process.

    A plugin may change only `remarks`, `unused`, and its entry of `state`.
    """

    plan: Any
    """The current plan (`vllm_fl.engine.plan.Plan`). Disabling an implementation changes it."""

    facts: Any
    """The facts of its configuration (`vllm_fl.engine.facts.EngineFacts`)."""

    rank: int
    """The rank of this worker in the engine."""

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
        It is empty before `Moment.LOADED`."""

    groups: Any
    """The communicators of the groups of ranks; None if vLLM creates them."""

    @property
    def disabled(self) -> Mapping[Key, Any]:
        """(op, impl id) -> why it is disabled on all ranks, with `code`, `rank` and `why`."""

    joins: bool
    """Whether this rank joins a running engine. If so, `gather` returns only its own value."""

    unused: dict[str, str]
    """Planned op -> why the model does not call it."""

    remarks: dict[Moment, list[str]]
    """Remarks for the log and the report."""

    state: dict[object, Any]
    """Owner -> its data about this engine. Use an object of your plugin as the owner."""

    def gather(self, what: str, mine: T) -> list[T]:
        """Exchange a value with all ranks. All ranks must call this in the same order.

        If a rank fails before its exchange, all ranks raise an error.

        Args:
            what: the purpose, for the log and an error, such as `compare the seeds`.
            mine: this rank's value; it is pickled.

        Returns:
            The values of all ranks, in order.
        """

    def on_exit(self, f: Callable[[], object]) -> None:
        """Call `f` when the engine ends or its startup fails; the last `f` is called first."""

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which calls of this thread belong to this engine and use its plan."""

    def on_serving(self, f: Callable[[], object]) -> None:
        """Call `f` just before the engine takes requests."""
