"""What a verb is at, on stderr, where it has said nothing for longer than two seconds.

A thread looks. Around a fork there must be none: in `by_hand` whoever forks and waits calls `tick`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from vllm_fl.plugins import breadcrumb

from ._show import last_said, say

QUIET, EVERY = 2.0, 30.0
"""Seconds of silence before the first line, and between two."""

BEAT = 0.25
"""Seconds between two looks."""


class _Progress:
    """One verb's.

    Args:
        verb: its name.
    """

    def __init__(self, verb: str) -> None:
        self.doing = ""
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


def current() -> _Progress:
    """That of the verb that runs, or one of no verb: a test calls a verb's function by itself."""
    return _current or _Progress("")


@contextmanager
def doing(what: str) -> Iterator[None]:
    """In the block, this is what the verb is at."""
    at = current()
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
