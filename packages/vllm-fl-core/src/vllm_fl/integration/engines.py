"""The engines of this process: what each of them has taken here, and which one is calling.

The engine is known by vLLM's forward context, which follows a forward pass into the threads of
vLLM's micro-batches. Where none is set (a vision encoder, a sampler), it is known by the worker's
method that the thread is in.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vllm.forward_context import get_forward_context, is_forward_context_available

from ..engine.facts import EngineFacts
from ..engine.phases import phases_of
from ..engine.plan import Plan
from ..engine.tables import Standing
from ..plugins.overrides import noted
from ..text import quote, scrub
from .ranks import Disabled, Key

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from ..engine.metrics import MetricsFile
    from ..engine.shadow import Shadow
    from ..engine.state_file import StateFile

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
    """One engine in this process, until it has ended or its start has failed.

    Args:
        plan: the plan it serves with; another one once something was disabled.
        facts: what the engine's configuration says.
        rank: its number within the engine.
        device: the worker's.
        worker: vLLM's worker.
        groups: what makes the communicators of vLLM's groups of ranks; None if vLLM does.
        joins: whether the rank joins a running engine (elastic EP), whose ranks do not gather.
        worker_facts: what plugins have reported, by distribution.
        table: what becomes of the table that the settings name.
        disabled: (op, impl id) -> why it is off on all ranks.
        unused: planned op -> why this engine is not seen to call it.
        state: what plugins and patchers keep of this engine, by owner.
        facts_of_lock: what a lock has of it; empty if the settings name none.
        differs: what differs from that lock, on whichever rank, a sentence each.
        digest: the sealed plan's.
        remarks: what else there is to say of its start, a phrase each.
        status: `starting`, `serving`, `ended` or `failed`: its start did.
        error: what a method of its worker raised last: `method`, `why`, `time`.
        metrics: the file of its counters, where the settings name one.
        report: the file of its report, where they name one.
        shadow: what compares calls of sampled steps, where the settings say so.
        is_watched: whether the model is looked at once more when its weights have changed.
        asleep: what of its memory it has given back.
        due: whether its weights were updated while something was.
        wrong: (op, impl id) -> why, of what the last look found wrong and serves all the same.
    """

    plan: Plan
    facts: EngineFacts
    rank: int
    device: torch.device
    worker: Any = None
    groups: Any = None
    joins: bool = False
    worker_facts: dict[str, Any] = field(default_factory=dict)
    table: Standing = field(default_factory=Standing)
    disabled: dict[Key, Disabled] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    state: dict[object, Any] = field(default_factory=dict)
    facts_of_lock: Mapping[str, Any] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    digest: str = ""
    remarks: list[str] = field(default_factory=list)
    status: str = "starting"
    error: dict[str, str] | None = None
    metrics: MetricsFile | None = None
    report: StateFile | None = None
    shadow: Shadow | None = None
    is_watched: bool = False
    asleep: frozenset[str] = frozenset()
    due: bool = False
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)
    _held: ExitStack = field(default_factory=ExitStack, init=False)

    def hold(self, give_back: Callable[..., object], *args: Any) -> None:
        """What was taken of the process for this engine: how it is given back when it leaves."""
        self._held.callback(give_back, *args)

    def leave(self) -> None:
        """Give back all that is held, the latest first. A second call does nothing."""
        self._held.close()

    def begin(self, vllm_config: VllmConfig) -> None:
        """From now on forward passes of this configuration's engine are known as this one's."""
        layers = vllm_config.compilation_config.static_forward_context
        _serving[id(layers)] = self, layers
        self.hold(_serving.pop, id(layers), None)

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


_serving: dict[int, tuple[Engine, object]] = {}
"""id of an engine's table of layers -> (the engine, the table). The table is kept alive, so that no
other one is given its id."""


class _Thread(threading.local):
    """What one thread is doing."""

    engine: Engine | None = None


_thread = _Thread()


def now() -> Engine | None:
    """The engine that is calling; None where none of ours is."""
    if is_forward_context_available():
        found = _serving.get(id(get_forward_context().no_compile_layers))
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


@contextmanager
def without(engine: Engine) -> Iterator[None]:
    """What this process calls inside the block is not called by `engine`: it gets vLLM's own.

    For a process in which one thread alone runs the model.
    """
    known = {key: entry for key, entry in _serving.items() if entry[0] is engine}
    for key in known:
        del _serving[key]
    try:
        with calling(None):
            yield
    finally:
        _serving.update(known)


def with_own_engine(method: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method, during which its thread calls for the worker's engine.

    One of `STARTS` that fails ends the engine: vLLM shuts no worker down that shares its process.
    """
    name = method.__name__
    is_of_start, what = name in STARTS, f"the start of an engine ({name})"
    is_last = name == [*STARTS][-1]

    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        noting = noted(what, is_last=is_last) if is_of_start else nullcontext()
        timing = phases_of(worker).during(STARTS[name]) if is_of_start else nullcontext()
        try:
            with noting, timing, calling(worker.vllm_fl_engine):
                return method(worker, *args, **kwargs)
        except BaseException as error:
            engine: Engine | None = worker.vllm_fl_engine
            if engine is not None and not name.startswith("vllm_fl_"):
                time = datetime.now(UTC).isoformat(timespec="seconds")
                engine.error = {"method": name, "why": scrub(quote(error)), "time": time}
                if is_of_start:
                    engine.status = "failed"
                    engine.leave()
            raise

    return called
