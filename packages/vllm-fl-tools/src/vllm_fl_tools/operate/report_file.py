"""Worker report as a file that outlives the engine: its plan, counters and failure."""

from __future__ import annotations

import atexit
import glob
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration.compat import vllm_version
from vllm_fl.integration.engines import Engine
from vllm_fl.logs import get_logger
from vllm_fl.settings.schema import Setting, Settings
from vllm_fl.text import scrub

from .metrics import has_counts
from .state_file import StateFile, of_worker

SCHEMA = 1

log = get_logger("engine")


@contextmanager
def report_session(
    engine: Engine, metrics: str, lock: Callable[[], Sequence[str]]
) -> Iterator[None]:
    """Write the worker report to a file until the engine ends, and keep the file.

    `metrics` is the user's path of the metrics file; the report is in the same directory. Its name
    has the rank and the replica, except for rank 0 of the first replica. `lock` returns the
    differences from the lock file.
    """
    settings = engine.facts.settings
    rank, replica = engine.rank, engine.replica
    startup = get_default_manager().startup
    plugins = startup.plugins if startup else ()
    about = {
        "model": str(getattr(engine.config.model_config, "model", "")),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": rank,
        "replica": replica,
        "engine": str(getattr(engine.config, "instance_id", "")),
        "started": _now(),
        "versions": {**engine.contents["versions"], "vllm": vllm_version()},
        "plugins": {plugin.owner.label: plugin.owner.version for plugin in plugins},
        "settings": [scrub(f"{s.key}={s.value} ({s.origin})") for s in _set(settings)],
    }

    def text() -> str | None:
        if engine.plan.record.is_aside:  # the current calls are not counted
            return None
        failures = [
            {"op": op, "impl": impl_id, "why": scrub(why)}
            for (op, impl_id), why in list(engine.plan.record.failures.items())
        ]
        content = {
            "schema": SCHEMA,
            "written": _now(),
            "state": engine.status,
            "error": engine.error,
            "failures": failures,
            "lock": list(lock()),
            **about,
            "report": engine.worker.vllm_fl_report(),
        }
        return json.dumps(content, indent=1, default=str) + "\n"

    named = Path(metrics).with_suffix(".report.json")
    path = of_worker(named, rank, replica) if rank or replica else named
    file = StateFile(named, path, text, stays=True, has_counted=partial(has_counts, engine))
    engine.on_serving(file.renew)

    def at_exit() -> None:
        engine.status = "ended"
        file.close()

    atexit.register(at_exit)
    try:
        yield
    finally:
        atexit.unregister(at_exit)
        file.close()


def log_last_states(metrics: str, since: float) -> None:
    """At the server's end, log whether each worker wrote its last report, and where it is.

    Args:
        metrics: the metrics file that the user names.
        since: when this process began, in seconds of `time.time`. Older files are from other
            engines.
    """
    named = Path(metrics)
    for path in sorted(named.parent.glob(f"{glob.escape(named.stem)}.report*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text("utf-8"))
            rank, state, written = (content[key] for key in ("rank", "state", "written"))
            if path.stat().st_mtime < since:
                continue
            if state in ("ended", "failed"):
                log.info("rank %s has %s: its last counts are in %s", rank, state, path)
                continue
            log.warning(
                "rank %s was stopped before it wrote its last report: counts until %s are in %s. "
                "Start the server with --shutdown-timeout 60 to get all",
                *(rank, written, path),
            )


def _set(settings: Settings) -> Iterator[Setting]:
    """Yield settings that are not defaults, except orders from plugins' files."""
    for setting in settings.values():
        is_plugins = not getattr(setting.value, "pinned", True) or setting.key == "platform_files"
        if setting.origin != "default" and not is_plugins:
            yield setting


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
