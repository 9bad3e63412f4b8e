"""What a verb is at, on stderr, where it has said nothing for longer than two seconds.

A thread looks. Around a fork there must be none: in `by_hand` whoever forks and waits calls `tick`.
The same thread ends a run whose call is in native code and does not come back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..plugins import breadcrumb
from ._show import last_said, say

__all__ = ["TookTooLong", "Watch", "by_hand", "doing", "progress"]

QUIET, EVERY = 2.0, 30.0
"""Seconds of silence before the first line, and between two."""

BEAT = 0.25
"""Seconds between two looks."""

GRACE = 10.0
"""Seconds that a call may take, beyond its limit, to come back from native code to Python, where
it is given up. One that does not come back cannot be given up alone: the run ends with it."""


class _Progress:
    """One verb's.

    Args:
        verb: its name.
    """

    def __init__(self, verb: str) -> None:
        self.doing = ""
        self.overdue: tuple[float, Callable[[], None]] | None = None
        self._verb, self._start, self._told = verb, time.monotonic(), False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(BEAT):
            self.tick()
            if self.overdue is not None and time.monotonic() > self.overdue[0]:
                self.overdue[1]()
                for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
                    stream.flush()
                os._exit(1)  # the main thread is inside of the call

    def tick(self, elsewhere: str = "") -> None:
        """Say a line if it is time.

        Args:
            elsewhere: the foreign code that runs in another process, if that is waited for.
        """
        silence = time.monotonic() - max(last_said(), self._start)
        if silence >= (EVERY if self._told else QUIET):
            self.tell(elsewhere)

    def tell(self, elsewhere: str = "") -> None:
        """Say a line, but not in the first seconds of a run."""
        seconds = time.monotonic() - self._start
        if seconds < QUIET:
            return
        self._told = True
        what = self.doing or elsewhere or breadcrumb.now() or "at work"
        with suppress(OSError, ValueError):  # stderr may be gone
            say(f"vllm-fl {self._verb}: {what} ({seconds:.0f} s)", error=True)


_current: _Progress | None = None


@contextmanager
def progress(verb: str) -> Iterator[None]:
    """In the block, a verb's run, no silence is long."""
    global _current
    _current = _Progress(verb)
    _current.start()
    try:
        yield
    finally:
        _current.stop()
        _current = None


@contextmanager
def doing(what: str) -> Iterator[None]:
    """In the block, this is what the verb is at."""
    at = _current or _Progress("")  # a test calls a verb's function by itself
    before, at.doing = at.doing, what
    try:
        yield
    finally:
        at.doing = before


@contextmanager
def by_hand() -> Iterator[Callable[[str], None]]:
    """In the block no thread says anything; gives what says a line if it is time."""
    if _current is None:
        yield lambda elsewhere: None
        return
    _current.stop()
    try:
        yield _current.tick
    finally:
        _current.start()


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

    def begin(self, unit: str) -> None:
        """A unit begins, which has a line of its own on a terminal."""
        self.at(unit, self._number + 1)
        if _current is not None and sys.stderr.isatty():
            _current.tell()

    def at(self, unit: str, number: int) -> None:
        """A unit begins of which somebody else will tell: it is named after a long silence alone.

        Args:
            unit: for people.
            number: how many there are with it.
        """
        self._unit, self._number = unit, number
        self._note(unit)

    def _note(self, running: str) -> None:
        self.running = running
        if _current is not None:
            _current.doing = f"[{self._number}/{self.units}] {running}"

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
        at = _current or _Progress("")
        at.overdue = time.monotonic() + self.limit + GRACE, self._stuck
        try:
            with _alarm(self.limit):
                yield
        finally:
            at.overdue = None


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
