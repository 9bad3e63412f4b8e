"""What a long run has found so far, in a file beside its result, so that the next run goes on."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_fl.cli.common import UsageError, say
from vllm_fl.files import open_to_append

__all__ = ["INTERRUPTED", "PartFile", "ended_by_signal"]

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


class PartFile:
    """Lines of JSON: a heading, then one for each piece of work that is done.

    A line counts when it is whole: a process may be killed, or a disk full, in the middle of one.

    Args:
        path: the file; it is made where it is not there.
        option: the option that names the result, for errors.

    Raises:
        UsageError: it cannot be written there, or another process is writing it.
    """

    def __init__(self, path: Path, option: str) -> None:
        self.path = path
        try:
            self._file = open_to_append(path)
        except OSError as error:
            raise UsageError(
                f"{option} {path.with_suffix('')}: {path} cannot be written: {error.strerror}; "
                "nothing was run"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UsageError(
                f"{option} {path.with_suffix('')}: another run is writing {path}; wait for it, or "
                "write elsewhere"
            ) from error
        self.found: list[dict[str, Any]] = []
        self._file.seek(0)
        whole = 0
        for line in self._file.read().splitlines(keepends=True):
            try:
                told = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                told = None
            if not isinstance(told, dict):
                break
            self.found.append(told)
            whole += len(line)
        self._whole = whole

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def resume(self, heading: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
        """Go on where a run with the same heading stopped; else say why not, and begin anew.

        Args:
            heading: what the work is for, facts by name under a few titles.

        Returns:
            The lines of the run that stopped, or none.
        """
        if self.found:
            difference = _difference(self.found[0], heading)
            if difference is None:
                return self.found[1:]
            why = f"{self.path} is of another run ({difference}); begun anew"
            say(f"vllm-fl: {why}", error=True)
        self._whole = 0
        self.append(heading)
        return []

    def append(self, told: Mapping[str, Any]) -> None:
        """Add a line. Raises OSError, as for a disk that is full."""
        self._file.truncate(self._whole)
        line = json.dumps(told, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._whole += len(line)

    def remove(self) -> None:
        """The result is written."""
        self.path.unlink(missing_ok=True)


def _difference(then: Mapping[str, Any], now: Mapping[str, Mapping[str, str]]) -> str | None:
    """The first fact that is not what it was; None where all are."""
    for title, facts in now.items():
        former = then.get(title)
        if not isinstance(former, dict):
            return f"it has no {title}"
        for name in sorted({*former, *facts}):
            if former.get(name) != facts.get(name):
                was, is_now = former.get(name, "not there"), facts.get(name, "not there")
                return f"{title}: {name} was {was}, and is {is_now}"
    return None


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
