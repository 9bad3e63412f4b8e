"""The arguments and results of hooks: `Engine`, and plain values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

FAILED, LACKED, REJECTED = "FL410", "FL411", "FL412"
"""The codes of objections."""

REFUSES = "it refuses every call of this model"
"""How the reason of REJECTED begins for a correct implementation that takes no call."""

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


@dataclass(frozen=True)
class WorkerContext:
    """What a plugin's `worker_start` may look at.

    Args:
        settings: the engine's effective settings (`vllm_fl.settings.schema.Settings`).
        device: the worker's `torch.device`.
        dtype: the model's `torch.dtype`.
        rank: this worker's rank, 0 for the first.
        vllm_config: vLLM's configuration, for what the other fields do not say.
        wants_invariance: the setting by which nothing may serve that was not measured to be
            batch-invariant, vLLM's own included, which has replaced operators of PyTorch's for
            it; empty where nobody asks for that.
    """

    settings: Any
    device: Any
    dtype: Any
    rank: int
    vllm_config: Any
    wants_invariance: str = ""


@dataclass(frozen=True)
class WorkerReport:
    """What a plugin's `worker_start` did.

    Args:
        lines: for the log, one sentence each.
        facts: JSON-able; they enter the plan's digest, so that compiled code is not reused
            under other facts.
    """

    lines: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Finding:
    """Something that `vllm-fl doctor` reports.

    Args:
        check: the check that found it, for programs (`vllm-plugins`).
        what: what is wrong, one sentence.
        why: what follows from it, or what caused it.
        todo: what ends it: a command, which a shell takes as it stands.
    """

    check: str
    what: str
    why: str
    todo: str


class Engine(Protocol):
    """One engine in this process: its data, and a few methods.

    A plugin changes only `remarks`, `unused`, and its entry of `state`.
    """

    plan: Any
    """The current plan (`vllm_fl.engine.plan.Plan`). Disabling an implementation changes it."""

    facts: Any
    """The facts of its configuration and its settings (`vllm_fl.engine.facts.EngineFacts`)."""

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
    """The communicators of the groups of ranks; None if vLLM makes them."""

    @property
    def disabled(self) -> Mapping[Key, Any]:
        """(op, impl id) -> why it is disabled on all ranks, with `code`, `rank` and `why`."""

    joins: bool
    """Whether this rank joins a running engine: `gather` then returns only its own value."""

    unused: dict[str, str]
    """Planned op -> why the model does not call it."""

    remarks: dict[Moment, list[str]]
    """Moment -> phrases about it, for the log and the report."""

    state: dict[object, Any]
    """Owner -> its data about this engine. Use an object of your plugin as the key."""

    def gather(self, what: str, mine: T) -> list[T]:
        """Exchange a value with all ranks, which must all call this in the same order.

        If a rank fails before its exchange, all ranks raise.

        Args:
            what: the purpose, as `compare the seeds`, for the log and an error.
            mine: this rank's value; it is pickled.

        Returns:
            The value of every rank, in the order of the ranks.
        """

    def on_exit(self, f: Callable[[], object]) -> None:
        """Call `f` when the engine ends or its startup fails, the latest first."""

    def active(self) -> AbstractContextManager[object]:
        """In the block, calls of this thread are calls of this engine, and follow its plan."""

    def on_serving(self, f: Callable[[], object]) -> None:
        """Call `f` just before the engine takes requests."""
