"""Durations of the phases of an engine's startup, in one worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Phases:
    """Seconds per phase, without nested phases, in the order in which the phases first ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        began, outer = time.monotonic(), self._inner
        self._inner = 0.0
        try:
            yield
        finally:
            took = time.monotonic() - began
            self.seconds[phase] = self.seconds.get(phase, 0.0) + took - self._inner
            self._inner = outer + took


def phases_of(worker: Any) -> Phases:
    """Return the phases of a worker's startup. The first call creates them."""
    found: Phases = vars(worker).setdefault("vllm_fl_phases", Phases())
    return found
