"""After the start: weights are updated, memory sleeps and wakes, and the plan is compared anew.

What a kernel has prepared from old weights is wrong from then on. Compiled code and captured graphs
hold what serves, so that nothing is taken out any more: who updated the weights is told.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ServingError
from ..logs import get_logger
from ..text import quote
from .ranks import Verdict, agree
from .verifying import seen_again, without

if TYPE_CHECKING:
    import torch

    from .worker import PlannedWorker

__all__ = ["Since", "verify", "watch"]

log = get_logger("engine")

ENDS_UPDATE = ("finish_weight_update", "reload_weights")
"""The methods of vLLM's workers after which a model has other weights."""

WITHIN_UPDATE = ("start_draft_weight_update", "start_weight_update", "update_weights")
"""Those that come before such an end, and may fail."""

SLEEPS = frozenset({"kv_cache", "weights"})
"""What a worker that sleeps has given back, by vLLM's names."""


@dataclass
class Since:
    """What has happened to a worker since its model was loaded.

    Args:
        models: gives the model and its draft model, by what their layers' names begin with.
        asleep: what of its memory it has given back.
        due: whether its weights were updated while something was.
        wrong: (op, impl id) -> why, of what the last look found wrong and serves all the same.
    """

    models: Callable[[], dict[str, torch.nn.Module]]
    asleep: frozenset[str] = frozenset()
    due: bool = False
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)


def watch(cls: type) -> None:
    """Let a worker's methods that change weights or memory say so here; it may lack some."""
    wrappers = {
        **dict.fromkeys(ENDS_UPDATE, _ending_an_update),
        **dict.fromkeys(WITHIN_UPDATE, _within_an_update),
        "sleep": _falling_asleep,
        "discard": _falling_asleep,
        "wake_up": _waking_up,
    }
    for name, wrapper in wrappers.items():
        if hasattr(cls, name):
            setattr(cls, name, wrapper(getattr(cls, name)))


def _since(worker: Any) -> Since | None:
    found: Since | None = getattr(worker, "vllm_fl_since", None)
    return found


def _ending_an_update(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = method(worker, *args, **kwargs)
        except Exception as error:
            if _since(worker) is not None:
                _missed(worker, error)
            raise
        if _since(worker) is not None:
            verify(worker, "the weights were updated")
        return result

    return called


def _within_an_update(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(worker, *args, **kwargs)
        except Exception as error:
            if _since(worker) is not None and _is_asked_for(worker):
                log.warning("%s", _told_of_failure(f"rank {worker.rank}: {quote(error)}"))
            raise

    return called


def _falling_asleep(method: Callable[..., Any]) -> Callable[..., Any]:
    """`sleep`, or `discard` of some of it."""

    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(worker, *args, **kwargs)
        if since := _since(worker):
            since.asleep |= _named(args, kwargs) or SLEEPS
        return result

    return called


def _waking_up(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(worker, *args, **kwargs)
        if since := _since(worker):
            since.asleep -= _named(args, kwargs) or since.asleep
            if since.due and not since.asleep:
                verify(worker, "the weights were updated while it slept")
        return result

    return called


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The memory that a call names as `tags`; nothing for all."""
    given = args[0] if args else kwargs.get("tags")
    return frozenset(given) if isinstance(given, Iterable) else frozenset()


def verify(worker: PlannedWorker, occasion: str) -> str:
    """Run the loaded model once, and compare the plan on its tensors, on all ranks.

    Requests that are under way are not disturbed: no cache is written, and nothing is counted.

    Args:
        worker: one that serves, between two steps.
        occasion: why it is asked, for the log.

    Returns:
        What was compared, or why nothing was.

    Raises:
        ServingError: something is wrong, on whichever rank. Of ranks that one process asks, the
            last one raises it: vLLM leaves answers behind an error unread.
    """
    since = _since(worker)
    assert since is not None
    if not _is_asked_for(worker):
        return "nothing is verified: nothing is planned, or VLLM_FL_PREFLIGHT is not verify"
    if since.asleep:
        since.due = True
        return f"verified when it is awake: {', '.join(sorted(since.asleep))} asleep"
    since.due = False
    if _in_step_with_others(worker):
        stopped = "each run of one replica of data parallelism waits for the others"
    else:
        stopped = _others(Verdict(worker.rank, failure=_obstacle(worker)))
    if stopped:
        if worker.rank == 0:
            log.warning("After %s nothing was verified: %s", occasion, stopped)
        return f"nothing was verified: {stopped}"
    start, plan = time.monotonic(), worker.vllm_fl_plan
    with plan.record.aside():
        live, not_run = seen_again(worker, since.models())
    verdicts = agree(Verdict(worker.rank, live.faults))
    found = [
        (op, impl_id, f"{why} (found on rank {v.rank})")
        for v in reversed(verdicts)
        for (op, impl_id), why in v.faults.items()
    ]
    since.wrong = {(op, impl_id): why for op, impl_id, why in found}
    if since.wrong:
        error = ServingError(_told(since.wrong, occasion), wrong=since.wrong)
        if worker.rank == 0:
            log.error("%s", error)
        if _raises(worker):
            raise error
        return error.message
    took = f"{live.compared} calls on live tensors in {time.monotonic() - start:.1f} s"
    told = f"nothing was verified: {not_run}" if not_run else took
    if live.left_out and not not_run:
        left = ", ".join(f"{op} ({why})" for op, why in sorted(live.left_out.items()))
        told += f"; not compared: {left}"
    if worker.rank == 0:
        say = log.warning if not_run else log.info
        say("After %s: %s", occasion, told)
    return told


def _is_asked_for(worker: PlannedWorker) -> bool:
    """Whether anything is compared in this engine; the same on all ranks."""
    return bool(worker.vllm_fl_preflight.live_counts)


def _in_step_with_others(worker: PlannedWorker) -> bool:
    """Whether replicas of data parallelism wait for one another in each run of the model."""
    replicas: int = worker.vllm_config.parallel_config.data_parallel_size
    return replicas > 1


def _obstacle(worker: PlannedWorker) -> str:
    """Why the model cannot be run now, or nothing."""
    runner: Any = getattr(worker, "model_runner", None)
    run = getattr(type(runner), "_dummy_run", None)
    if run is not None and not run.__module__.startswith("vllm."):
        return (
            f"the dummy run of {type(runner).__name__} is not vLLM's, and might write the KV cache"
        )
    if getattr(runner, "execute_model_state", None) is not None:
        return "a step is not at its end"
    if worker.vllm_config.lora_config is not None and worker.list_loras():  # type: ignore[attr-defined]
        return "adapters are loaded, which vLLM's dummy run would drop"
    return ""


def _others(mine: Verdict) -> str:
    """What stops a rank, of all ranks; nothing where none is stopped."""
    return "; ".join(f"rank {v.rank}: {v.failure}" for v in agree(mine) if v.failure)


def _missed(worker: PlannedWorker, error: Exception) -> None:
    """An update has failed on this rank: let the others know, who wait; it never raises."""
    told = f"rank {worker.rank}: {quote(error)}"
    since = _since(worker)
    if since is None or not _is_asked_for(worker):
        return
    if not since.asleep and not _in_step_with_others(worker):
        try:
            told = _others(Verdict(worker.rank, failure=quote(error)))
        except Exception:  # another rank is gone: the update's own error is what the caller needs
            log.debug("The ranks could not agree on a failed update", exc_info=True)
    if worker.rank == 0:
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


def _raises(worker: PlannedWorker) -> bool:
    """Whether this rank is the one that tells the caller; each is where each has its own."""
    parallel = worker.vllm_config.parallel_config
    own = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
    last: int = parallel.world_size - 1
    return own or worker.rank == last
