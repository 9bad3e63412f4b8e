"""After the start: weights are updated, memory sleeps and wakes, and the plan is compared anew.

What a kernel has prepared from old weights is wrong from then on. Compiled code and captured graphs
hold what serves, so that nothing is taken out any more: who updated the weights is told.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ServingError
from ..logs import get_logger
from ..text import quote
from .engines import Engine
from .ranks import Verdict, agree
from .verifying import checks_of, compared, reasons, seen_again, without

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
    """A worker's method, whose end an engine is told that is looked at once more.

    Args:
        method: the method.
        done: called with the engine and the memory that the call names.
        failed: called with the engine and the method's error, which is raised all the same.
    """

    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        engine: Engine | None = worker.vllm_fl_engine
        if engine is None or not engine.is_watched:  # before the model is loaded
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
    verify(engine, "the weights were updated")


def _fell_asleep(engine: Engine, named: frozenset[str]) -> None:
    engine.asleep |= named or SLEEPS


def _woke_up(engine: Engine, named: frozenset[str]) -> None:
    engine.asleep -= named or engine.asleep
    if engine.due and not engine.asleep:
        verify(engine, "the weights were updated while it slept")


def _failed_within(engine: Engine, error: Exception) -> None:
    if _is_asked_for(engine):
        log.warning("%s", _told_of_failure(_failed_here(engine, error)))


def _nothing(engine: Engine, _: object) -> None:
    """Nothing follows."""


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The memory that a call names as `tags`; nothing for all."""
    given = args[0] if args else kwargs.get("tags")
    return frozenset(given) if isinstance(given, Iterable) else frozenset()


def verify(engine: Engine, occasion: str) -> str:
    """Run the loaded model once, and compare the plan on its tensors, on all ranks.

    Requests that are under way are not disturbed: no cache is written, and nothing is counted.

    Args:
        engine: an engine between two steps.
        occasion: why it is asked, for the log.

    Returns:
        What was compared, or why nothing was.

    Raises:
        ServingError: something is wrong, on whichever rank. Of ranks that one process asks, the
            last one raises it: vLLM leaves answers behind an error unread.
    """
    rank = engine.rank
    if not _is_asked_for(engine):
        return "nothing is verified: nothing is planned, or VLLM_FL_PREFLIGHT is not verify"
    if engine.asleep:
        engine.due = True
        return f"verified when it is awake: {', '.join(sorted(engine.asleep))} asleep"
    engine.due = False
    if _in_step_with_others(engine):
        stopped = "each run of one replica of data parallelism waits for the others"
    else:
        stopped = _others(Verdict(rank, failure=_obstacle(engine)))
    if stopped:
        if rank == 0:
            log.warning("After %s nothing was verified: %s", occasion, stopped)
        return f"nothing was verified: {stopped}"
    began = time.monotonic()
    live, not_run = seen_again(engine)
    verdicts = agree(Verdict(rank, reasons(live)))
    engine.wrong = {
        key: f"{why} (found on rank {v.rank})"
        for v in reversed(verdicts)
        for key, why in v.faults.items()
    }
    if engine.wrong:
        error = ServingError(_told(engine.wrong, occasion), wrong=engine.wrong)
        if rank == 0:
            log.error("%s", error)
        if _raises(engine):
            raise error
        return error.message
    told = f"nothing was verified: {not_run}" if not_run else compared(live, began)
    if rank == 0:
        say = log.warning if not_run else log.info
        say("After %s: %s", occasion, told)
    return told


def _is_asked_for(engine: Engine) -> bool:
    """Whether anything is compared in this engine; the same on all ranks."""
    return bool(checks_of(engine).live_counts)


def _in_step_with_others(engine: Engine) -> bool:
    """Whether replicas of data parallelism wait for one another in each run of the model."""
    replicas: int = engine.config.parallel_config.data_parallel_size
    return replicas > 1


def _obstacle(engine: Engine) -> str:
    """Why the model cannot be run now, or nothing."""
    runner = engine.runner
    run = getattr(type(runner), "_dummy_run", None)
    if run is not None and not run.__module__.startswith("vllm."):
        return (
            f"the dummy run of {type(runner).__name__} is not vLLM's, and might write the KV cache"
        )
    if getattr(runner, "execute_model_state", None) is not None:
        return "a step is not at its end"
    if engine.config.lora_config is not None and engine.worker.list_loras():
        return "adapters are loaded, which vLLM's dummy run would drop"
    return ""


def _others(mine: Verdict) -> str:
    """What stops a rank, of all ranks; nothing where none is stopped."""
    return "; ".join(f"rank {v.rank}: {v.failure}" for v in agree(mine) if v.failure)


def _failed_here(engine: Engine, error: Exception) -> str:
    return f"rank {engine.rank}: {quote(error)}"


def _missed(engine: Engine, error: Exception) -> None:
    """An update has failed on this rank: let the others know, who wait; it never raises."""
    if not _is_asked_for(engine):
        return
    told = _failed_here(engine, error)
    if not engine.asleep and not _in_step_with_others(engine):
        try:
            told = _others(Verdict(engine.rank, failure=quote(error)))
        except Exception:  # another rank is gone: the update's own error is what the caller needs
            log.debug("The ranks could not agree on a failed update", exc_info=True)
    if engine.rank == 0:
        log.warning("%s", _told_of_failure(told))


def _told_of_failure(told: str) -> str:
    return (
        f"An update of the weights failed, and nothing was verified after it: {told}. The weights "
        "may be the old ones in part; the next update is verified"
    )


def _told(wrong: dict[tuple[str, str], str], occasion: str) -> str:
    each = "; ".join(
        f"implementation '{impl_id}' of op '{op}': {why}" for (op, impl_id), why in wrong.items()
    )
    return (
        f"Since {occasion}, wrong is {each}. The new weights are loaded, and it serves on: "
        f"compiled code and captured graphs hold it. An engine that is started with "
        f"{without(wrong)} is without it"
    )


def _raises(engine: Engine) -> bool:
    """Whether this rank is the one that tells the caller; each is where each has its own."""
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
