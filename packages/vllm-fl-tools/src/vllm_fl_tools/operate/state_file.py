"""Files with the current state of a worker, written by a thread again and again."""

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
"""Seconds from one writing to the next: collectors read every 15 to 60."""

PATIENCE = 1.0
"""Seconds that `close` waits for a file system that does not answer; three times as long where the
file stays, whose last state counts."""

log = get_logger("engine")


def of_worker(named: str | Path, rank: int | str, replica: int) -> Path:
    """Return the path of a worker's file, made from the one that the user sets.

    Args:
        named: `vllm.prom` becomes `vllm.rank0.prom`, and `vllm.dp1.rank0.prom` for the second
            replica of data parallelism.
        rank: the worker's, within its replica.
        replica: which one, from 0.
    """
    path = Path(named)
    of_replica = f".dp{replica}" if replica else ""
    return path.parent / f"{path.stem}{of_replica}.rank{rank}{path.suffix}"


class StateFile:
    """Writes what is so now to a file until it is closed, from a thread of its own.

    The file is written beside its place and then put there, so that who reads it finds it whole.
    One that cannot be written is said once and tried again.

    Args:
        variable: the setting that names it, for the log.
        named: the file that the user names.
        path: the worker's own.
        text: what is so now; None where that is not to be told, or changes at this moment.
        stays: whether it is written once more when it is closed, and stays. Else it goes.
        every: seconds from one writing to the next.
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
        """Let the thread write it at once: what is so has become another thing."""
        self._woken.set()

    def close(self) -> None:
        """End the thread, and leave the file as it is then or take it away; again does nothing."""
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
        except Exception as error:  # whatever it is, the engine serves on
            if not self._is_said:
                self._is_said = True
                log.warning(
                    "%s: %s cannot be written (%s). It is tried again every %.0f s, without a word",
                    self._variable,
                    self.path,
                    quote(error),
                    self._every,
                )
