"""Temporary replacement of the functions that the guards of a plan call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm_fl.dispatch.guard import Guard
from vllm_fl.dispatch.record import Record
from vllm_fl.engine.opaque import is_opaque
from vllm_fl.engine.plan import Plan
from vllm_fl.plugins.types import OpImpl


@contextmanager
def replacing(
    record: Record,
    instead: Callable[[OpImpl], Callable[..., Any]],
    asking: Callable[[OpImpl], Callable[..., Any] | None] = lambda impl: impl.supports,
    *,
    at_most: int | None = None,
) -> Iterator[None]:
    """Inside the block, every guard of a record calls `instead(impl)` for each candidate.

    Afterwards the guards are restored. Inside the block, nothing may be disabled, and other threads
    must not call the guards.

    Args:
        instead: candidate -> function with the same parameters.
        asking: candidate -> function that replaces its `supports`.
        at_most: the number of candidates to replace, from the first; None for all.
    """
    guards = [guard for guard in list(record.guards) if isinstance(guard, Guard)]
    try:
        for guard in guards:
            own = guard.chain.impls
            others = (_calling(i, instead(i), asking(i)) for i in own[:at_most])
            impls = *others, *(() if at_most is None else own[at_most:])
            guard.run(guard.chain.of(*impls, bare=guard.chain.bare))
        yield
    finally:
        for guard in guards:
            guard.switch()


def _calling(impl: OpImpl, fn: Callable[..., Any], supports: Callable[..., Any] | None) -> OpImpl:
    """Return `impl` with other functions. Its signature is kept, because it determines
    `needs_layer`."""
    if fn is impl.fn and supports is impl.supports:
        return impl
    fn = fn if fn is impl.fn else functools.wraps(impl.fn)(fn)
    return replace(impl, fn=fn, supports=supports)


def computes(plan: Plan, impl: OpImpl) -> bool:
    """Whether a guard's candidate computes its op itself, as an implementation of the plan. vLLM's
    implementation is not part of the plan, and an opaque operator calls another guard.
    """
    entry = plan.entries.get(impl.op_name)
    own = next((i for i in entry.impls if i.impl_id == impl.impl_id), None) if entry else None
    if entry is None or own is None:
        return False
    return impl.fn is own.fn or not (entry.ceilings or is_opaque(own))
