"""State of a worker in a file that a thread rewrites periodically."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vllm_fl.logs import get_logger
from vllm_fl.text import quote
from vllm_fl_tools.files import Draft

EVERY = 20.0
"""Seconds between two writes: collectors usually read every 15 to 60 s."""

PATIENCE = 1.0
"""Seconds that `close` waits for a file system that does not respond; three times as long if the
file is kept, because its last state matters."""

log = get_logger("engine")


def of_worker(named: str | Path, rank: int | str, replica: int) -> Path:
    """Return the path of a worker's file, from the user's path `named`.

    `vllm.prom` becomes `vllm.rank0.prom`, and `vllm.dp1.rank0.prom` for the second replica of data
    parallelism. Replicas are numbered from 0.
    """
    path = Path(named)
    of_replica = f".dp{replica}" if replica else ""
    return path.parent / f"{path.stem}{of_replica}.rank{rank}{path.suffix}"


class StateFile:
    """Writes the current state to a file from a thread, until it is closed.

    The text replaces the file atomically: readers never see an incomplete file. Only the first
    failure is logged; every failure is retried.

    Args:
        variable: the setting that enables the file, for the log.
        named: the user's path.
        path: the worker's path.
        text: returns the current state; None to skip this write.
        stays: whether `close` writes the file a last time and keeps it, instead of deleting it.
        every: seconds between two writes.
    """

    def __init__(
        self,
        variable: str,
        named: Path,
        path: Path,
        text: Callable[[], str | None],
        *,
        stays: bool = False,
        every: float = EVERY,
    ) -> None:
        self._variable, self._named, self.path = variable, named, path
        self._text, self._stays, self._every = text, stays, every
        self._is_said = False
        self._is_closed, self._woken = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-fl-state", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Wake the thread to write now: the state has changed."""
        self._woken.set()

    def close(self) -> None:
        """Stop the thread and write the last state or delete the file. May be called repeatedly."""
        self._is_closed = True
        self._woken.set()
        self._thread.join(3 * PATIENCE if self._stays else PATIENCE)

    def _run(self) -> None:
        while not self._is_closed:
            self._write()
            self._woken.wait(self._every)
            self._woken.clear()
        if self._stays:
            self._write()
            return
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        try:
            if self._named.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self._named))
            text = self._text()
            if text is None:
                return
            with Draft(self.path) as draft:
                draft.put(text.encode(errors="replace"))
        except Exception as error:  # the engine must continue to serve
            if not self._is_said:
                self._is_said = True
                log.warning(
                    "%s: %s cannot be written (%s). It is tried again every %.0f s, without a word",
                    self._variable,
                    self.path,
                    quote(error),
                    self._every,
                )
