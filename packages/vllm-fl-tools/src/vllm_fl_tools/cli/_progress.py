"""Reports a verb's progress on stderr if it has printed nothing for two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vllm_fl.plugins import breadcrumb

from ._show import last_said, say

QUIET, EVERY = 2.0, 30.0
"""Seconds of silence before the first line, and between two lines."""

BEAT = 0.25
"""Seconds between two checks."""


class Progress:
    """The progress of the running verb; `doing` is its current work, empty if unknown."""

    def __init__(self) -> None:
        self.begin("")

    def begin(self, verb: str) -> None:
        self.verb, self.doing = verb, ""
        self._start, self._has_printed = time.monotonic(), False

    def tick(self, elsewhere: str = "") -> None:
        """Print a line if it is due. `elsewhere` describes the work of another process."""
        silence = time.monotonic() - max(last_said(), self._start)
        if silence >= (EVERY if self._has_printed else QUIET):
            self._has_printed = True
            what = self.doing or elsewhere or breadcrumb.current_note() or "working"
            seconds = time.monotonic() - self._start
            with suppress(OSError, ValueError):  # stderr may be closed
                say(f"vllm-fl {self.verb}: {what} ({seconds:.0f} s)", error=True)


current_progress = Progress()


@contextmanager
def progress(verb: str, *, forks: bool = False) -> Iterator[None]:
    """Report the progress of a verb during the block.

    With `forks`, the verb forks this process, which must then have no second thread. Therefore the
    verb calls `current_progress.tick` itself.
    """
    current_progress.begin(verb)
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(BEAT):
            current_progress.tick()

    thread = threading.Thread(target=run, daemon=True)
    if not forks:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if not forks:
            thread.join()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Report `what` as the verb's work during the block."""
    before, current_progress.doing = current_progress.doing, what
    try:
        yield
    finally:
        current_progress.doing = before
