"""The engines of this process: what each of them has taken here, and which one is calling.

The engine is known by vLLM's forward context, which follows a forward pass into the threads of
vLLM's micro-batches. Where none is set (a vision encoder, a sampler), it is known by the worker's
method that the thread is in.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.forward_context import get_forward_context, is_forward_context_available

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
"""The methods of vLLM's workers that an engine starts with, and what the phase of each is called.
One that fails ends it."""


@dataclass(eq=False)
class Engine:
    """One engine in this process, until it has ended or its startup has failed.

    Args:
        facts: what the engine's configuration says.
        rank: its number within the engine.
        worker: vLLM's worker.
        joins: whether the rank joins a running engine (elastic EP), whose ranks do not gather.

    Attributes:
        device: the worker's, once it is open.
        plan: the plan, once it is made; another one after something was disabled.
        contents: what the plan consists of, JSON-able.
        digest: the sealed plan's.
        groups: what makes the communicators of vLLM's groups of ranks; None if vLLM does.
        worker_facts: what plugins have reported, by distribution.
        disabled: (op, impl id) -> why it is off on all ranks.
        wrong: (op, impl id) -> why, of what the last check found wrong and serves all the same.
        unused: planned op -> why this engine is not seen to call it.
        remarks: moment -> phrases for the report.
        state: what plugins and patchers keep of this engine, by owner.
        status: `starting`, `serving`, `ended` or `failed`: its startup did.
        error: what a method of its worker raised last: `method`, `why`, `time`.
        is_loaded: whether the model is bound to the plan and has its weights.
        asleep: what of its memory it has given back.
        due: whether its weights were updated while something was.
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
        """Return every rank's value, in the order of the ranks. A rank that joins has its own only.

        Args:
            what: the purpose, as `settle on a plan`; all ranks gather the same in the same order.
            mine: this rank's value; it is pickled.

        Raises:
            StartError: a rank cannot go on, died or is too late; with `failures`, on all ranks.
        """
        return [mine] if self.joins else exchange(what, mine)

    def fail(self, what: str, why: str) -> None:
        """Let the other ranks, which gather, know why this one cannot go on.

        Raises:
            StartError: always, with `failures`, on all ranks; not on a rank that joins.
        """
        if not self.joins:
            exchange(what, None, why)

    def on_unbind(self, undo: Callable[..., object], *args: Any) -> None:
        """Call `undo` when the plan is unbound: the engine ends, or is bound to another plan."""
        self._bound.callback(undo, *args)

    def on_exit(self, f: Callable[[], object]) -> None:
        """Call `f` when the engine ends or its startup fails, before the plan is unbound."""
        self._exits.callback(_logged, f)

    def on_serving(self, f: Callable[[], object]) -> None:
        """Call `f` just before the engine takes requests."""
        self._on_serving.append(f)

    def active(self) -> AbstractContextManager[None]:
        """Let calls of this thread inside the block be this engine's."""
        return calling(self)

    def serve(self) -> None:
        """Call what waits for the engine to serve."""
        self.status = "serving"
        for f in self._on_serving:
            f()

    def unbind(self) -> None:
        """Undo what binds the plan, the latest first. A second call does nothing."""
        self._bound.close()

    def end(self, status: str) -> None:
        """Call what waits for the end, then unbind the plan. A second call does nothing."""
        self.status = status
        with self._bound:
            self._exits.close()

    def begin(self, vllm_config: VllmConfig) -> None:
        """From now on forward passes of this configuration's engine are known as this one's."""
        layers = vllm_config.compilation_config.static_forward_context
        _engines[id(layers)] = self, layers
        self.on_unbind(_engines.pop, id(layers), None)

    @property
    def config(self) -> VllmConfig:
        """vLLM's configuration of the engine."""
        found: VllmConfig = self.worker.vllm_config
        return found

    @property
    def replica(self) -> int:
        """Which one of data parallelism it is, from 0."""
        # vLLM's own number of a replica is 0 in all of them where the model has no experts.
        return getattr(self.config.parallel_config, "data_parallel_index", 0)

    @property
    def runner(self) -> Any:
        """vLLM's model runner; None where the worker has none."""
        return getattr(self.worker, "model_runner", None)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model, where the worker shows it: a device's own need not."""
        try:
            found: torch.nn.Module = self.worker.get_model()
        except (AttributeError, NotImplementedError):
            return None
        return found

    @property
    def models(self) -> dict[str, torch.nn.Module]:
        """The model and its draft model, by what the names of their layers begin with here."""
        draft = getattr(self.runner, "get_draft_model", lambda: None)
        found: dict[str, Any] = {"": self.model, "(draft model) ": draft()}
        # What drafts by other means than a model, as n-grams, may keep anything under that name.
        return {prefix: model for prefix, model in found.items() if hasattr(model, "named_modules")}


def _logged(f: Callable[[], object]) -> None:
    """Call `f`, and log what it raises: vLLM's own shutdown, and an error, must not be lost."""
    try:
        f()
    except Exception as error:
        log.exception("The end of an engine: %s", quote(error))


_engines: dict[int, tuple[Engine, object]] = {}
"""id of an engine's table of layers -> (the engine, the table). The table is kept alive, so that no
other one is given its id."""


class _Thread(threading.local):
    """What one thread is doing."""

    engine: Engine | None = None


_thread = _Thread()


def now() -> Engine | None:
    """The engine that is calling; None where none of ours is."""
    if is_forward_context_available():
        found = _engines.get(id(get_forward_context().no_compile_layers))
        if found is not None:
            return found[0]
    return _thread.engine


@contextmanager
def calling(engine: Engine | None) -> Iterator[None]:
    """What this thread calls inside the block is called by `engine`."""
    before, _thread.engine = _thread.engine, engine
    try:
        yield
    finally:
        _thread.engine = before


def with_own_engine(method: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method, during which its thread calls for the worker's engine.

    One of `STARTS` that fails ends the engine: vLLM shuts no worker down that shares its process.
    """
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
