"""After startup: weights are updated, memory sleeps and wakes, and the plan is checked again.

What a kernel has prepared from old weights is wrong from then on. Compiled code and captured graphs
hold what serves, so nothing can be disabled: the caller who updated the weights gets the error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ServingError, StartError, VllmFLError
from ..logs import get_logger
from ..plugins.inspection import Moment
from ..text import quote
from .engines import Engine
from .hooks import has_inspectors
from .settling import settle, without

log = get_logger("engine")

SLEEPS = frozenset({"kv_cache", "weights"})
"""What a worker that sleeps has given back, by vLLM's names."""


def watch(cls: type) -> None:
    """Let a worker's methods that change weights or memory say so here; it may lack some."""
    for name, (done, failed) in FOLLOWS.items():
        if hasattr(cls, name):
            setattr(cls, name, _followed(getattr(cls, name), done, failed))


def _followed(
    method: Callable[..., Any],
    done: Callable[[Engine, frozenset[str]], object],
    failed: Callable[[Engine, Exception], object],
) -> Callable[..., Any]:
    """Return a worker's method after which the engine is checked.

    Args:
        method: the method.
        done: called with the engine and the memory that the call names.
        failed: called with the engine and the method's error, which is raised all the same.
    """

    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        engine: Engine | None = worker.vllm_fl_engine
        if engine is None or engine.joins or not engine.is_loaded:
            return method(worker, *args, **kwargs)
        try:
            result = method(worker, *args, **kwargs)
        except Exception as error:
            failed(engine, error)
            raise
        done(engine, _named(args, kwargs))
        return result

    return called


def _updated(engine: Engine, _: frozenset[str]) -> None:
    check(engine, "the weights were updated")


def _fell_asleep(engine: Engine, named: frozenset[str]) -> None:
    engine.asleep |= named or SLEEPS


def _woke_up(engine: Engine, named: frozenset[str]) -> None:
    engine.asleep -= named or engine.asleep
    if engine.due and not engine.asleep:
        check(engine, "the weights were updated while it slept")


def _failed_within(engine: Engine, error: Exception) -> None:
    if _is_checked(engine):
        log.warning("%s", _failure(_failed_here(engine, error)))


def _nothing(engine: Engine, _: object) -> None:
    """Nothing follows."""


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The memory that a call names as `tags`; nothing for all."""
    given = args[0] if args else kwargs.get("tags")
    return frozenset(given) if isinstance(given, Iterable) else frozenset()


def check(engine: Engine, occasion: str) -> str:
    """Ask on all ranks whether something that serves is wrong now.

    Args:
        engine: an engine between two steps.
        occasion: why it is asked, for the log.

    Returns:
        What was compared, or why nothing was.

    Raises:
        ServingError: something is wrong, on whichever rank. If one process asks several ranks, the
            last one raises it: vLLM leaves answers behind an error unread.
    """
    if not _is_checked(engine):
        return "nothing is verified: nothing is planned, or VLLM_FL_PREFLIGHT is not verify"
    if engine.asleep:
        engine.due = True
        return f"verified when it is awake: {', '.join(sorted(engine.asleep))} asleep"
    engine.due = False
    stopped = "each run of one replica of data parallelism waits for the others"
    if not _in_step_with_others(engine):
        stopped = ""
        try:
            engine.wrong = settle(engine, Moment.UPDATED)
        except VllmFLError as failed:
            failures = failed.failures if isinstance(failed, StartError) else ()
            stopped = "; ".join(failures) or f"rank {engine.rank}: {failed.message}"
    if stopped:
        engine.remarks[Moment.UPDATED] = [f"nothing was verified: {stopped}"]
    if engine.wrong and not stopped:
        error = ServingError(_fault(engine.wrong, occasion), wrong=engine.wrong)
        if engine.rank == 0:
            log.error("%s", error)
        if _raises(engine):
            raise error
        return error.message
    found = "; ".join(engine.remarks[Moment.UPDATED])
    if engine.rank == 0 and found:
        if found.startswith("nothing was verified"):
            log.warning("After %s %s", occasion, found)
        else:
            log.info("After %s: %s", occasion, found)
    return found


def _is_checked(engine: Engine) -> bool:
    """Return whether anything is compared in this engine; the same on all ranks."""
    entries = engine.plan.entries.values()
    asks = engine.facts.settings.preflight == "verify" or has_inspectors()
    return asks and any(each.impls for each in entries)


def _in_step_with_others(engine: Engine) -> bool:
    """Return whether replicas of data parallelism wait for one another in each run of the model."""
    replicas: int = engine.config.parallel_config.data_parallel_size
    return replicas > 1


def _failed_here(engine: Engine, error: Exception) -> str:
    return f"rank {engine.rank}: {quote(error)}"


def _missed(engine: Engine, error: Exception) -> None:
    """Let the other ranks know that an update has failed on this one; it never raises."""
    if not _is_checked(engine):
        return
    told = _failed_here(engine, error)
    if not engine.asleep and not _in_step_with_others(engine):
        try:
            engine.fail("update the weights", quote(error))
        except StartError as failed:
            told = "; ".join(failed.failures)
        except Exception:  # another rank is gone: the update's own error is what the caller needs
            log.debug("The ranks could not agree on a failed update", exc_info=True)
    if engine.rank == 0:
        log.warning("%s", _failure(told))


def _failure(told: str) -> str:
    return (
        f"An update of the weights failed, and nothing was verified after it: {told}. The weights "
        "may be the old ones in part; the next update is verified"
    )


def _fault(wrong: Mapping[tuple[str, str], str], occasion: str) -> str:
    each = "; ".join(
        f"implementation '{impl_id}' of op '{op}': {why}" for (op, impl_id), why in wrong.items()
    )
    return (
        f"Since {occasion}, wrong is {each}. The new weights are loaded, and it serves on: "
        f"compiled code and captured graphs hold it. An engine that is started with "
        f"{without(wrong)} is without it"
    )


def _raises(engine: Engine) -> bool:
    """Return whether this rank raises for the caller; all do if each has its own caller."""
    parallel = engine.config.parallel_config
    own = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
    last: int = parallel.world_size - 1
    return own or engine.rank == last


FOLLOWS = {
    **dict.fromkeys(("finish_weight_update", "reload_weights"), (_updated, _missed)),
    **dict.fromkeys(
        ("start_draft_weight_update", "start_weight_update", "update_weights"),
        (_nothing, _failed_within),
    ),
    **dict.fromkeys(("sleep", "discard"), (_fell_asleep, _nothing)),
    "wake_up": (_woke_up, _nothing),
}
"""Methods of vLLM's workers -> what follows when one has come to its end, and when it has failed.

The first two end an update: the model has other weights then. The next three come before its end.
"""
