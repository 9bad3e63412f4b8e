"""Writes each worker's settings, and which of our variables its process has. Its setting is the
folder's path; a worker can get it only from the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_fl import SettingSpec, WorkerContext, WorkerReport, hookimpl

FOLDER = SettingSpec[str | None]("vendor_watch_folder", "VLLM_FL_VENDOR_WATCH_FOLDER", None)


@hookimpl
def settings() -> Iterable[SettingSpec[Any]]:
    return (FOLDER,)


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport:
    folder = context.settings[FOLDER.key].value
    facts = {
        "node": os.environ["NODE"],
        "settings": {
            key: (getattr(setting.value, "written", setting.value), setting.origin)
            for key, setting in context.settings.items()
            if not key.startswith("devices.")
        },
        "table": context.settings.tuned.file,
        "variables": sorted(name for name in os.environ if name.startswith(("VLLM_FL_", "FLAGCX"))),
    }
    (Path(folder) / f"rank{context.rank}.json").write_text(json.dumps(facts))
    return WorkerReport()
