"""A plugin that vetoes an implementation on one rank, and logs the phases of the engine.

Put this folder on PYTHONPATH and set `VLLM_FL_PLUGIN_MODULES=veto` to load it. VETO_AT sets the
moment of the veto, VETO_RANK the rank (default 0).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm_fl import Engine, Key, Moment, Objection, get_logger, hookimpl

VETOED = ("silu_and_mul", "vendor.acme")

log = get_logger("veto")


@hookimpl
def inspect_plan(engine: Engine, moment: Moment) -> Mapping[Key, Objection] | None:
    """Object to one implementation, at moment VETO_AT on rank VETO_RANK."""
    is_here = engine.rank == int(os.environ.get("VETO_RANK", "0"))
    if is_here and moment == os.environ.get("VETO_AT") and VETOED not in engine.disabled:
        return {VETOED: Objection("FL410", f"vetoed when it was {moment}")}
    return None


@hookimpl
@contextmanager
def engine_session(engine: Engine) -> Iterator[None]:
    """Log when the engine begins, serves and ends, each with the planned implementation."""

    def note(what: str) -> None:
        log.info("Diary: %s with %s", what, engine.plan.entries[VETOED[0]].label)

    note("it begins")
    engine.on_serving(lambda: note("it serves"))
    try:
        yield
    finally:
        note("it ends")
