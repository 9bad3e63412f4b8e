"""A plugin for one engine: it vetoes an implementation on one rank, and keeps a diary.

`VLLM_FL_PLUGIN_MODULES=veto` loads it if this folder is on PYTHONPATH. VETO_AT names the moment,
VETO_RANK the rank, which is 0 by default.
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
    """Object to one implementation, at one moment and on one rank."""
    is_here = engine.rank == int(os.environ.get("VETO_RANK", "0"))
    if is_here and moment == os.environ.get("VETO_AT") and VETOED not in engine.disabled:
        return {VETOED: Objection("FL410", f"vetoed when it was {moment}")}
    return None


@hookimpl
@contextmanager
def engine_session(engine: Engine) -> Iterator[None]:
    """Log when the engine begins, serves and ends, with the implementation that it has then."""

    def note(what: str) -> None:
        log.info("Diary: %s with %s", what, engine.plan.entries[VETOED[0]].label)

    note("it begins")
    engine.on_serving(lambda: note("it serves"))
    try:
        yield
    finally:
        note("it ends")
