"""Plugin that deletes the files listed in VANISHING just before vLLM starts its first process. The
plugin ships the settings file VANISHING_SHIPPED if that is set."""

from __future__ import annotations

import os
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vllm_fl import PolicyDefaults, hookimpl

_start = BaseProcess.start


def _start_without_files(process: Any) -> None:
    for name in os.environ["VANISHING"].split(","):
        Path(name).unlink(missing_ok=True)
    print("vanishing: the settings files are gone", flush=True)
    BaseProcess.start = _start  # type: ignore[method-assign]
    _start(process)


if parent_process() is None:
    BaseProcess.start = _start_without_files  # type: ignore[method-assign]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    shipped = os.environ.get("VANISHING_SHIPPED")
    return PolicyDefaults(Path(shipped)) if shipped else None
