"""Verify the plan again after startup, when weights are updated or memory wakes up.

An update invalidates data that a kernel has prepared from old weights. Nothing can be disabled,
because compiled code and captured graphs contain the implementation. Therefore the caller of the
update gets the error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..dispatch import get_default_manager
from ..errors import ServingError, StartError, VllmFLError
from ..logs import get_logger
from ..plugins.calling import asking
from ..plugins.inspection import Key, Moment
from ..plugins.types import KernelImpl
from ..text import quote
from .engines import Engine
from .settling import settle, stock_setting

log = get_logger("engine")

ENDS = ("finish_weight_update", "reload_weights")
"""The worker methods of vLLM that end an update. The model then has its new weights."""

PARTS = ("start_draft_weight_update", "start_weight_update", "update_weights")
"""The worker methods of vLLM that begin an update or send some of its weights."""

SLEEPS = ("sleep", "discard")

MEMORY = frozenset({"kv_cache", "weights"})


def wrap_updates(cls: type) -> None:
    """Wrap those methods of a worker class that change weights or memory."""
    for name in (*ENDS, *PARTS, *SLEEPS, "wake_up"):
        if hasattr(cls, name):
            setattr(cls, name, _followed(name, getattr(cls, name)))


def _followed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        engine: Engine | None = worker.vllm_fl_engine
        if engine is None or engine.joins or not engine.is_loaded:
            return method(worker, *args, **kwargs)
        try:
            result = method(worker, *args, **kwargs)
        except Exception as error:
            if name in ENDS or name in PARTS:
                _update_failed(engine, error, others_wait=name in ENDS)
            raise
        tags = args[0] if args else kwargs.get("tags")
        memory = frozenset(tags if isinstance(tags, Iterable) else ()) or MEMORY
        if name in ENDS:
            check(engine, "the weights were updated")
        elif name in SLEEPS:
            engine.asleep |= memory
        elif name == "wake_up":
            engine.asleep -= memory
            if engine.due and not engine.asleep:
                check(engine, "the weights were updated during sleep")
        return result

    return called


def check(engine: Engine, occasion: str) -> str:
    """Verify the plan on all ranks of a serving engine, between two steps. Return what was
    verified, or why nothing was verified.

    Raises:
        ServingError: an implementation is incorrect on any rank. If one process calls several
            ranks, only the last rank raises it, because vLLM ignores replies after an error.
    """
    if not _is_checked(engine):
        return "nothing is verified: no op is planned, or VLLM_FL_PREFLIGHT is run or off"
    if engine.asleep:
        engine.due = True
        return f"verification is deferred until wake-up: {', '.join(sorted(engine.asleep))} asleep"
    engine.due = False
    stopped = "data-parallel replicas wait for each other in each run of the model"
    if not _has_replicas(engine):
        stopped = ""
        try:
            engine.wrong = settle(engine, Moment.UPDATED)
        except VllmFLError as failed:
            failures = failed.failures if isinstance(failed, StartError) else ()
            stopped = "; ".join(failures) or f"rank {engine.rank}: {failed.message}"
    if engine.wrong and not stopped:
        error = ServingError(_fault(engine.wrong, occasion), wrong=engine.wrong)
        if engine.rank == 0:
            log.error("%s", error)
        if _raises(engine):
            raise error
        return error.message
    if stopped:
        engine.remarks[Moment.UPDATED] = [f"nothing was verified: {stopped}"]
    found = "; ".join(engine.remarks[Moment.UPDATED])
    if engine.rank == 0 and found:
        if found.startswith("nothing was verified"):
            log.warning("After %s, %s", occasion, found)
        else:
            log.info("After %s: %s", occasion, found)
    return found


def _is_checked(engine: Engine) -> bool:
    """Whether this engine's plan can be verified. The result is the same on all ranks."""
    inspectors = asking(get_default_manager().registry.plugins, "inspect_plan")
    asks = engine.facts.settings.compares
    asks = asks or any(plugin.kind == "backend" for plugin in inspectors)
    entries = engine.plan.entries.values()
    return asks and any(each.impls or each.classes(KernelImpl) for each in entries)


def _has_replicas(engine: Engine) -> bool:
    """Whether data-parallel replicas wait for each other in each run of the model."""
    replicas: int = engine.config.parallel_config.data_parallel_size
    return replicas > 1


def _update_failed(engine: Engine, error: Exception, *, others_wait: bool) -> None:
    """Log a failed update. It raises nothing, because the caller needs the update's error. With
    `others_wait`, the other ranks are about to verify the plan and are notified."""
    if not _is_checked(engine):
        return
    failures = f"rank {engine.rank}: {quote(error)}"
    if others_wait and not engine.asleep and not _has_replicas(engine):
        try:
            engine.fail("update the weights", quote(error))
        except StartError as failed:
            failures = "; ".join(failed.failures)
        except Exception:
            log.debug("The ranks could not agree on a failed update", exc_info=True)
    if engine.rank == 0 or not others_wait:
        log.warning(
            "A weight update failed, and nothing was verified after it: %s. Some weights may still "
            "be the old ones; the next update is verified",
            failures,
        )


def _fault(wrong: Mapping[Key, str], occasion: str) -> str:
    each = "; ".join(
        f"implementation '{impl_id}' of op '{op}': {why}" for (op, impl_id), why in wrong.items()
    )
    return (
        f"After {occasion}, verification failed for {each}. The engine keeps serving with the new "
        "weights, since compiled code and captured graphs contain the implementation. Restart with "
        f"{stock_setting(wrong)} to avoid it"
    )


def _raises(engine: Engine) -> bool:
    """Whether this rank raises the error: the last rank, or every rank if each has a caller."""
    parallel = engine.config.parallel_config
    own = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
    last: int = parallel.world_size - 1
    return own or engine.rank == last
