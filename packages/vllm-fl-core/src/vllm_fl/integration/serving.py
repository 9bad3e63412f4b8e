"""Which engine is calling: the plan behind what a process has only one of, as a torch operator.

The engine is known by vLLM's forward context, which follows a forward pass into the threads of
vLLM's micro-batches. Where none is set (a vision encoder, a sampler), it is known by the worker's
method that the thread is in.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.forward_context import get_forward_context, is_forward_context_available

from ..engine.plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["RUNS_MODEL", "begin", "calling", "end", "plan_now", "with_own_plan", "without"]

RUNS_MODEL = (
    "add_lora",
    "apply_model",
    "compile_or_warm_up_model",
    "determine_available_memory",
    "discard",
    "elastic_ep_execute",
    "execute_dummy_batch",
    "execute_model",
    "finish_weight_update",
    "initialize_from_config",
    "pin_lora",
    "reload_weights",
    "remove_lora",
    "reset_weights",
    "sample_tokens",
    "sleep",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
    "wake_up",
)
"""The methods of vLLM's workers, beside `load_model`, that run a model's code, or that of its
layers on new weights. A worker may lack some of them."""

_serving: dict[int, tuple[Plan, object]] = {}
"""id of an engine's table of layers -> (its plan, the table). The table is kept alive, so that no
other one is given its id."""


class _Thread(threading.local):
    """What one thread is doing."""

    plan: Plan | None = None


_thread = _Thread()


def plan_now() -> Plan | None:
    """The plan of the engine that is calling; None where no engine of ours is."""
    if is_forward_context_available():
        found = _serving.get(id(get_forward_context().no_compile_layers))
        if found is not None:
            return found[0]
    return _thread.plan


def begin(plan: Plan, vllm_config: VllmConfig) -> None:
    """From now on forward passes of this configuration's engine are known as the plan's."""
    layers = vllm_config.compilation_config.static_forward_context
    _serving[id(layers)] = plan, layers


def end(plan: Plan) -> None:
    """The engine of `plan` has ended, or could not start."""
    for key, (known, _) in list(_serving.items()):
        if known is plan:
            del _serving[key]


@contextmanager
def calling(plan: Plan | None) -> Iterator[None]:
    """What this thread calls inside the block is called by the engine of `plan`."""
    before, _thread.plan = _thread.plan, plan
    try:
        yield
    finally:
        _thread.plan = before


@contextmanager
def without(plan: Plan) -> Iterator[None]:
    """What this process calls inside the block is not called by the engine of `plan`.

    It gets vLLM's own. For a process in which one thread alone runs the model.
    """
    known = {key: entry for key, entry in _serving.items() if entry[0] is plan}
    for key in known:
        del _serving[key]
    try:
        with calling(None):
            yield
    finally:
        _serving.update(known)


def with_own_plan(method: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method, during which its thread calls for the worker's plan."""

    @functools.wraps(method)
    def called(worker: Any, *args: Any, **kwargs: Any) -> Any:
        with calling(getattr(worker, "vllm_fl_plan", None)):
            return method(worker, *args, **kwargs)

    return called
