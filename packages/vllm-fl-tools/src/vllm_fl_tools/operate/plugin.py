"""Plugin for the lock file, the metrics, the worker report and the faulty calls of an engine."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

from vllm_fl.hookspecs import hookimpl
from vllm_fl.logs import speaks_for_all
from vllm_fl.plugins.inspection import Key, Moment, Objection
from vllm_fl.settings.schema import Settings


@hookimpl
def process_start() -> None:
    """Add the workers' metrics to vLLM's `/metrics`."""
    if file := os.environ.get(Settings.metrics.variable):
        from .scraping import show_worker_files

        show_worker_files(file)
        if speaks_for_all():
            from .report_file import log_last_states

            atexit.register(log_last_states, file, time.time())


@hookimpl
def inspect_plan(engine: Any, moment: Moment) -> Mapping[Key, Objection] | None:
    """Fail the startup of an engine that differs from its lock file; keep faulty calls."""
    settings = engine.facts.settings
    if moment is Moment.PLANNED and settings.keep_faults is not None:
        from .faults import Faults

        keeper = engine.state.get(Faults) or engine.state.setdefault(Faults, Faults(engine))
        engine.plan.record.keeper = keeper
    if moment is Moment.PLANNED and settings.locked is not None:
        from .locking import Lock, facts_of_lock

        if Lock not in engine.state:
            facts = facts_of_lock(engine.facts, engine.config, engine.device)
            lock = engine.state[Lock] = Lock(engine, settings.locked, facts)
            engine.on_serving(lock.compare_plan)
            lock.compare_facts()
    return None


@hookimpl
def engine_session(engine: Any) -> AbstractContextManager[object] | None:
    """Write the engine's metrics and its worker report to files."""
    metrics = engine.facts.settings.metrics
    return None if metrics is None else _files(engine, metrics)


@hookimpl
def worker_report(engine: Any) -> Mapping[str, object] | None:
    """Report the contents of the lock file that `vllm-fl plan --save` writes."""
    from .locking import Lock

    return {"lock": engine.state[Lock].to_json()} if Lock in engine.state else None


@contextmanager
def _files(engine: Any, metrics: str) -> Iterator[None]:
    from .locking import Lock
    from .metrics import metrics_file
    from .report_file import report_session

    def differs() -> list[str]:
        return engine.state[Lock].differs if Lock in engine.state else []

    with report_session(engine, metrics, differs), closing(metrics_file(engine, metrics, differs)):
        yield
