"""How long each phase of an engine's start took, as one of its workers sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Phases:
    """Seconds by phase. Of a phase in which another one runs, those without the other's.

    Attributes:
        seconds: phase -> its seconds so far, in the order in which they ended first.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """In the block this is what the start is at."""
        began, outer = time.monotonic(), self._inner
        self._inner = 0.0
        try:
            yield
        finally:
            took = time.monotonic() - began
            self.seconds[phase] = self.seconds.get(phase, 0.0) + took - self._inner
            self._inner = outer + took


def before_worker(configured: tuple[float, float] | None) -> dict[str, float]:
    """What came before a worker that begins now: phase -> seconds.

    Args:
        configured: when vLLM began to make the engine's configuration and when it had made it, as
            `time.time` tells it; None where that is not known.
    """
    now, process = time.time(), process_seconds()
    if configured is None:
        return {"the process before its worker": process}
    began, made = configured
    return {
        "vLLM: the configuration": made - began,
        "vLLM: until the worker's process": max(now - process - made, 0.0),
        "the process before its worker": min(process, max(now - made, 0.0)),
    }


def process_seconds() -> float:
    """How long ago this process began, as Linux tells it; 0 elsewhere."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def phases_of(worker: Any) -> Phases:
    """The phases of a worker's start, from its first one on."""
    found: Phases = vars(worker).setdefault("vllm_fl_phases", Phases())
    return found
