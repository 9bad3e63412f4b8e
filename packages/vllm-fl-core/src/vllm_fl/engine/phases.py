"""How long each phase of an engine's start took, as one of its workers sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def phases_of(worker: Any) -> Phases:
    """The phases of a worker's start, from its first one on."""
    found: Phases = vars(worker).setdefault("vllm_fl_phases", Phases())
    return found
