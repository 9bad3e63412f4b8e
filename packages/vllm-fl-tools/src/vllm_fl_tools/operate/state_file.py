"""Files with the current state of a worker, which a thread writes periodically and on request."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from vllm_fl.logs import get_logger
from vllm_fl.settings.schema import Settings
from vllm_fl.text import quote
from vllm_fl_tools.atomic_write import Draft

INTERVAL = 20.0
"""Seconds between two periodic writes, because collectors read every 15 to 60 s."""

POLL = 0.02
"""Seconds between two checks whether a reader asked for a new state."""

CLOSE_TIMEOUT = 1.0
"""Seconds that `close` waits for a file system that does not respond. It waits three times as long
if the file is kept, because the last state then matters.
"""

log = get_logger("engine")


def of_worker(named: str | Path, rank: int | str, replica: int) -> Path:
    """Return the path of a worker's file, from the user's path `named`.

    `vllm.prom` becomes `vllm.rank0.prom`, and `vllm.dp1.rank0.prom` for the second replica of data
    parallelism. Replicas are numbered from 0.
    """
    path = Path(named)
    of_replica = f".dp{replica}" if replica else ""
    return path.parent / f"{path.stem}{of_replica}.rank{rank}{path.suffix}"


def request(files: Mapping[Path, Callable[[], Iterable[Path]]], patience: float) -> None:
    """Ask the workers of this machine for their current state, and wait until their files have it.

    Args:
        files: the user's metrics file -> a function that returns the workers' files. Files older
            than `INTERVAL` are ignored, because their processes are gone.
        patience: maximum seconds to wait.
    """
    deadline, asked = time.monotonic() + patience, time.time_ns()

    def is_late(path: Path) -> bool:
        with suppress(OSError):
            return asked - 1.5e9 * INTERVAL < path.stat().st_mtime_ns < asked
        return False

    for named in files:
        with suppress(OSError):
            _request_of(named).touch()
            os.utime(_request_of(named), ns=(asked, asked))
    while time.monotonic() < deadline:
        if not any(is_late(path) for paths in files.values() for path in paths()):
            return
        time.sleep(POLL / 2)


def _request_of(named: Path) -> Path:
    return named.with_name(f".{named.name.split('.')[0]}.refresh")


class StateFile:
    """Write the current state to a file until it is closed, from a thread.

    The file is written every `INTERVAL` seconds, when `renew` is called, when the first call is
    counted, and when a reader asks for it (`request`). Readers never see an incomplete file. Only
    the first failure is logged; every failure is retried.

    Args:
        named: the file that the user sets.
        path: the worker's file.
        text: returns the state, or None if it must not be written now.
        stays: whether the file is written at the end and kept; otherwise it is deleted.
        has_counted: whether the state has counts that are not 0.
    """

    def __init__(
        self,
        named: Path,
        path: Path,
        text: Callable[[], str | None],
        *,
        stays: bool = False,
        has_counted: Callable[[], bool] = bool,
    ) -> None:
        self._named, self.path, self._text = named, path, text
        self._stays, self._has_counted = stays, has_counted
        self._is_said = False
        self._is_closed, self._woken = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-fl-state", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Write the file now, since the state has changed."""
        self._woken.set()

    def close(self) -> None:
        """End the thread after a last write, or delete the file. A second call does nothing."""
        self._is_closed = True
        self._woken.set()
        self._thread.join(3 * CLOSE_TIMEOUT if self._stays else CLOSE_TIMEOUT)

    def _run(self) -> None:
        written: object = None
        due = 0.0
        while not self._is_closed:
            asked = self._asked(), self._has_counted()
            if self._woken.is_set() or asked != written or time.monotonic() >= due:
                self._woken.clear()
                due = time.monotonic() + INTERVAL
                if self._write():
                    written = asked
            self._woken.wait(POLL)
        if self._stays:
            self._write()
            return
        for path in (self.path, _request_of(self._named)):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _asked(self) -> int:
        """The time at which a reader last asked for the state; 0 if never."""
        with suppress(OSError):
            return _request_of(self._named).stat().st_mtime_ns
        return 0

    def _write(self) -> bool:
        """Write the file; return False if there is no state now."""
        try:
            if self._named.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self._named))
            now = time.time_ns()
            text = self._text()
            if text is None:
                return False
            with Draft(self.path) as draft:
                draft.put(text.encode(errors="replace"))
            os.utime(self.path, ns=(now, now))  # when the state was read, for `request`
        except Exception as error:  # the engine must keep serving
            if not self._is_said:
                self._is_said = True
                log.warning(
                    "%s: %s cannot be written (%s). It is tried again every %.0f s",
                    Settings.metrics.variable,
                    self.path,
                    quote(error),
                    INTERVAL,
                )
        return True
