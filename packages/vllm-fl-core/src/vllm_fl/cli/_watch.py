"""Watch a long run: print progress to stderr, and give up a call that takes too long."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from ._progress import by_hand
from ._show import last_said, say

__all__ = ["TookTooLong", "Watch"]

QUIET, EVERY = 2.0, 30.0
"""Seconds before the first line on a terminal, which then has one for each unit; and between two
lines within a unit."""

GRACE = 10.0
"""Seconds that a call may take, beyond the limit, to come back from native code to Python, where
it is given up. One that does not come back cannot be given up alone: the run ends with it."""


class TookTooLong(KeyboardInterrupt):
    """A call was given up. As a KeyboardInterrupt it is not taken for a kernel's own error."""


class Watch:
    """Says what is running, and gives up what takes too long.

    Args:
        units: how many units of work there are.
        limit: seconds that one call may take.
        stuck: called, in another thread, when a call takes longer than that and is in native code,
            where nothing can end it. It must end the process.
    """

    def __init__(self, units: int, limit: float, stuck: Callable[[], None]) -> None:
        self.units, self.limit, self._stuck = units, limit, stuck
        self._unit, self._call, self._number = "", "", 0
        self._told = 0
        self._overdue: float | None = None
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._on_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()

    def __enter__(self) -> Watch:
        self._silenced = by_hand()  # it tells by itself
        self._silenced.__enter__()
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        self._ended.set()
        self._silenced.__exit__(None, None, None)

    @property
    def running(self) -> str:
        """What is running, for people."""
        return f"{self._unit}{self._call and f', {self._call}'}"

    def begin(self, unit: str) -> None:
        """A unit begins."""
        self._unit, self._call = unit, ""
        self._number += 1
        if self._on_terminal and time.monotonic() - self._start >= QUIET:
            self._tell()

    def at(self, unit: str, number: int) -> None:
        """A unit begins of which somebody else will tell: it is named after a long silence alone.

        Args:
            unit: for people.
            number: how many there are with it.
        """
        self._unit, self._call = unit, ""
        self._number = self._told = number

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """One call, which is given up after the limit.

        Raises:
            TookTooLong: it was.
        """
        self._call = name
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        self._overdue = time.monotonic() + self.limit + GRACE
        try:
            with _alarm(self.limit):
                yield
        finally:
            self._overdue = None

    def _run(self) -> None:
        told = time.monotonic()
        while not self._ended.wait(min(QUIET, EVERY, GRACE) / 4 or 0.01):
            now = time.monotonic()
            if self._overdue is not None and now > self._overdue:
                self._stuck()
            fresh = self._on_terminal and self._told < self._number
            if fresh and now - self._start >= QUIET:
                self._tell()
            elif self._unit and now - max(told, last_said()) >= EVERY:
                told = now
                self._tell()

    def _tell(self) -> None:
        with self._lock, suppress(OSError, ValueError):  # stderr may be gone
            self._told = self._number
            seconds = time.monotonic() - self._start
            say(f"[{self._number}/{self.units}] {self.running} ({seconds:.0f} s)", error=True)


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
