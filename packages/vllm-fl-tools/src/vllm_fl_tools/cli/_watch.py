"""The progress of a long run, and time limits of its calls."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ._progress import current_progress

INTERRUPTED = 130
"""Exit status of shells after Ctrl-C."""

GRACE = 10.0
"""Seconds after its time limit in which a call may return from native code to Python, where it can
be interrupted. After that the whole run ends."""


class TookTooLong(KeyboardInterrupt):
    """A call exceeded its time limit.

    As a KeyboardInterrupt, it is not mistaken for a kernel's error.
    """


class Watch:
    """Reports the current unit of a long run, and interrupts calls that take too long.

    Args:
        units: number of units of work.
        limit: time limit of one call in seconds.
        stuck: called in another thread before the process ends, if a call exceeds the limit in
            native code, which cannot be interrupted.
    """

    def __init__(self, units: int, limit: float, stuck: Callable[[], None]) -> None:
        self.units, self.limit, self._stuck = units, limit, stuck
        self.running, self._unit, self._number = "", "", 0

    def begin(self, unit: str, number: int) -> None:
        """Begin a unit of work; `number` counts from 1."""
        self._unit, self._number = unit, number
        self._note(unit)

    def _note(self, running: str) -> None:
        self.running = running
        current_progress.doing = f"[{self._number}/{self.units}] {running}"

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Limit the duration of one call. Raises TookTooLong."""
        self._note(f"{self._unit}, {name}")
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread gets signals
            return
        overdue = threading.Timer(self.limit + GRACE, self._end)
        overdue.daemon = True
        overdue.start()
        try:
            with _alarm(self.limit):
                yield
        finally:
            overdue.cancel()

    def _end(self) -> None:
        """End the process during a call in the main thread."""
        self._stuck()
        for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
            stream.flush()
        os._exit(1)


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """During the block, handle SIGTERM like Ctrl-C."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TookTooLong after `seconds`, and again every second, since code may swallow it."""
    armed = True

    def ring(number: int, frame: object) -> None:
        if armed:
            raise TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        while armed:  # the signal may arrive here
            with suppress(TookTooLong):
                armed = False
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)
