"""A long run: which unit of it is at work, and giving up a call that takes too long."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ._progress import current

__all__ = ["INTERRUPTED", "TookTooLong", "Watch", "ended_by_signal"]

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""

GRACE = 10.0
"""Seconds that a call may take, beyond its limit, to come back from native code to Python, where
it is given up. One that does not come back cannot be given up alone: the run ends with it."""


class TookTooLong(KeyboardInterrupt):
    """A call was given up. As a KeyboardInterrupt it is not taken for a kernel's own error."""


class Watch:
    """Says which unit of a long run is at work, and gives up a call that takes too long.

    Args:
        units: how many units of work there are.
        limit: seconds that one call may take.
        stuck: called, in another thread, when a call takes longer than that and is in native code,
            where nothing can end it. The process ends with it.
    """

    def __init__(self, units: int, limit: float, stuck: Callable[[], None]) -> None:
        self.units, self.limit, self._stuck = units, limit, stuck
        self.running, self._unit, self._number = "", "", 0

    def begin(self, unit: str, number: int) -> None:
        """Begin a unit, the `number`th."""
        self._unit, self._number = unit, number
        self._note(unit)

    def _note(self, running: str) -> None:
        self.running = running
        current.doing = f"[{self._number}/{self.units}] {running}"

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """One call, which is given up after the limit.

        Raises:
            TookTooLong: it was.
        """
        self._note(f"{self._unit}, {name}")
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
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
        """End the process, whose main thread is inside of a call."""
        self._stuck()
        for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
            stream.flush()
        os._exit(1)


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """In the block, SIGTERM ends the run as Ctrl-C does."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TookTooLong here after `seconds`, and every second again, since it may be swallowed."""
    armed = True

    def ring(number: int, frame: object) -> None:
        if armed:
            raise TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        while armed:  # it may ring right here
            with suppress(TookTooLong):
                armed = False
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)
