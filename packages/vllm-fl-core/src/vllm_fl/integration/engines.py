"""The engines of this process, their changes to vLLM, and the engine that is calling.

vLLM's forward context identifies the calling engine, also in threads of micro-batches. Without a
forward context (a vision encoder, a sampler), it is the engine of the worker method that the thread
is running.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.forward_context import get_forward_context, is_forward_context_available

from ..dispatch.context import swapped
from ..engine.facts import EngineFacts
from ..engine.phases import phases_of
from ..engine.plan import Plan
from ..logs import get_logger
from ..plugins.inspection import Key, Moment
from ..text import quote, scrub
from .exchange import exchange
from .ranks import Disabled

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


T = TypeVar("T")

log = get_logger("engine")

STARTS = {
    "load_model": "vLLM: the model",
    "determine_available_memory": "vLLM: memory, with what is compiled for it",
    "initialize_from_config": "vLLM: the KV cache",
    "compile_or_warm_up_model": "vLLM: warm-up and graphs",
}
"""vLLM's worker methods that start an engine -> the name of each startup phase. An error in such a
method ends the engine."""


@dataclass(eq=False)
class Engine:
    """One engine in this process, until it ends or its startup fails.

    Args:
        rank: the worker's rank within the engine.
        joins: whether the rank joins a running engine (elastic EP). The other ranks then do not
            exchange values with it.

    Attributes:
        device: the worker's device, once it is open.
        plan: the current plan, once it is made. It is replaced when an implementation is disabled.
        contents: the contents of the plan, JSON-serialisable.
        groups: the object that makes the communicators of vLLM's rank groups; None if vLLM makes
            them.
        worker_facts: distribution -> facts that its plugin has reported.
        disabled: (op, impl id) -> why it is disabled on all ranks.
        wrong: (op, impl id) -> why a serving implementation was incorrect at the last check.
        unused: planned op -> why this engine is not expected to call it.
        remarks: moment -> phrases for the report.
        state: data that plugins and patchers keep for this engine, by owner.
        status: `starting`, `serving`, `ended`, or `failed` if the startup failed.
        error: the last error of a worker method: `method`, `why`, `time`.
        is_loaded: whether the model uses the plan and has its weights.
        asleep: the kinds of memory that the worker has released (`updates.MEMORY`).
        due: whether to verify at wake-up, because weights were updated during sleep.
    """

    facts: EngineFacts
    rank: int
    worker: Any = None
    joins: bool = False
    device: torch.device = field(init=False)
    plan: Plan = field(init=False)
    contents: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    groups: Any = None
    worker_facts: dict[str, Any] = field(default_factory=dict)
    disabled: dict[Key, Disabled] = field(default_factory=dict)
    wrong: dict[Key, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    remarks: dict[Moment, list[str]] = field(default_factory=lambda: {each: [] for each in Moment})
    state: dict[object, Any] = field(default_factory=dict)
    status: str = "starting"
    error: dict[str, str] | None = None
    is_loaded: bool = False
    asleep: frozenset[str] = frozenset()
    due: bool = False
    _bound: ExitStack = field(default_factory=ExitStack, init=False)
    _exits: ExitStack = field(default_factory=ExitStack, init=False)
    _on_serving: list[Callable[[], object]] = field(default_factory=list, init=False)

    def gather(self, what: str, mine: T) -> list[T]:
        """Return every rank's value (`exchange`); on a rank that joins, only its own. If a rank has
        failed, died or is late, all ranks raise a StartError with `failures`."""
        return [mine] if self.joins else exchange(what, mine)

    def fail(self, what: str, why: str) -> None:
        """Send a failure to the other ranks, which are gathering. They raise a StartError with
        `failures`, and so does this rank, unless it joins."""
        if not self.joins:
            exchange(what, None, why)

    def on_unbind(self, undo: Callable[..., object], *args: Any) -> None:
        """Call `undo` when the plan is unbound: at the engine's end, or for another plan."""
        self._bound.callback(undo, *args)

    def on_exit(self, f: Callable[[], object]) -> None:
        """Call `f` when the engine ends or its startup fails, before the plan is unbound."""
        self._exits.callback(_logged, f)

    def on_serving(self, f: Callable[[], object]) -> None:
        self._on_serving.append(f)

    def active(self) -> AbstractContextManager[None]:
        return calling(self)

    def serve(self) -> None:
        self.status = "serving"
        for f in self._on_serving:
            f()

    def unbind(self) -> None:
        """Undo all changes for the plan, latest first. A second call has no effect."""
        self._bound.close()

    def end(self, status: str) -> None:
        """Call the functions of `on_exit`, then unbind the plan. A second call only sets the
        status."""
        self.status = status
        with self._bound:
            self._exits.close()

    def begin(self, vllm_config: VllmConfig) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        _engines[id(layers)] = self, layers
        self.on_unbind(_engines.pop, id(layers), None)

    @property
    def config(self) -> VllmConfig:
        found: VllmConfig = self.worker.vllm_config
        return found

    @property
    def replica(self) -> int:
        """The engine's index among data-parallel replicas, from 0."""
        # `data_parallel_rank` is 0 in every replica of a model without experts.
        return getattr(self.config.parallel_config, "data_parallel_index", 0)

    @property
    def runner(self) -> Any:
        return getattr(self.worker, "model_runner", None)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model. It is None if the worker of a device plugin does not expose it."""
        try:
            found: torch.nn.Module = self.worker.get_model()
        except (AttributeError, NotImplementedError):
            return None
        return found

    @property
    def models(self) -> dict[str, torch.nn.Module]:
        """The model and its draft model, by the prefix of their layers' names."""
        draft = getattr(self.runner, "get_draft_model", lambda: None)
        found: dict[str, Any] = {"": self.model, "(draft model) ": draft()}
        # If the drafter has no model, such as for n-grams, this may be any object.
        return {prefix: model for prefix, model in found.items() if hasattr(model, "named_modules")}


def _logged(f: Callable[[], object]) -> None:
    """Call `f` and log its error, which must not stop vLLM's shutdown or hide another error."""
    try:
        f()
    except Exception as error:
        log.exception("Shutdown of an engine failed: %s", quote(error))


_engines: dict[int, tuple[Engine, object]] = {}
"""id of an engine's table of layers -> (engine, table). The entry keeps the table alive, so its id
stays unique."""


class _Thread(threading.local):
    engine: Engine | None = None


_thread = _Thread()


def calling_engine() -> Engine | None:
    if is_forward_context_available():
        found = _engines.get(id(get_forward_context().no_compile_layers))
        if found is not None:
            return found[0]
    return _thread.engine


def calling(engine: Engine | None) -> AbstractContextManager[None]:
    return swapped(_thread, "engine", engine)


def with_own_engine(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a worker's method to attribute its calls to the worker's engine. An error in a method of
    `STARTS` ends the engine, because vLLM does not shut down a worker in its own process."""
    name = method.__name__
    is_of_start = name in STARTS

    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        timing = phases_of(worker).during(STARTS[name]) if is_of_start else nullcontext()
        try:
            with timing, calling(worker.vllm_fl_engine):
                return method(worker, *args, **kwargs)
        except BaseException as error:
            engine: Engine | None = worker.vllm_fl_engine
            if engine is not None and not name.startswith("vllm_fl_"):
                time = datetime.now(UTC).isoformat(timespec="seconds")
                engine.error = {"method": name, "why": scrub(quote(error)), "time": time}
                if is_of_start:
                    engine.end("failed")
            raise

    return called
