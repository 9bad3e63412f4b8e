"""Record which third-party code is running, in a file, and log it if it is slow.

An import that calls `os._exit`, or a kernel that aborts, ends a process without an error message.
Therefore a process keeps a locked file in the user's cache while third-party code runs. The next
process of the same environment, and `vllm-fl doctor`, report files without a lock. If the file
cannot be written (no home, a full disk), nothing is recorded.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..text import clean

log = logging.getLogger("vllm_fl.plugins")

FOLDER = "_VLLM_FL_RUNNING"
"""The variable with the folder of the notes. Commands set it for child processes. If it is empty,
no notes are written."""

SLOW = 10.0
"""Seconds until running code is logged as slow."""

LARGEST = 16384
"""Maximum bytes to read from a file."""

FORGOTTEN = 30 * 24 * 3600
"""Seconds until the file of a dead process is removed."""


@dataclass(frozen=True)
class Crumb:
    """A note of one process. `what` is the innermost code that ran, with its distribution; `when`
    is its start in seconds since the epoch; `prefix` is the environment (`sys.prefix`)."""

    what: str
    host: str
    pid: int
    when: float
    prefix: str
    file: Path
    lives: bool

    def __str__(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.when))
        return f"process {self.pid} ended on {at} while running {self.what}"

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink()


_notes: dict[Path, int] = {}
"""Path of each note of this process -> file descriptor."""

_running: list[str] = []
"""The third-party code that this process is running, innermost last."""


def _forget_in_child() -> None:
    """Close the parent's files: open descriptors would keep the parent's locks after its death."""
    for fd in _notes.values():
        os.close(fd)
    _notes.clear()
    _running.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def current_note() -> str:
    """Return the third-party code that this process is running, or an empty text."""
    return _running[-1] if _running else ""


def folder() -> Path | None:
    """Return the folder of the notes (`FOLDER` or `~/.cache/vllm-fl/running`). Return None without
    a home folder."""
    if (given := os.environ.get(FOLDER)) is not None:
        return Path(given) if given else None
    return cache_folder("running")


def cache_folder(name: str) -> Path | None:
    """Return the path of a folder of vllm-fl in the user's cache. None without a home directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # XDG: a relative path is ignored
        cache = os.path.expanduser("~/.cache")
    return Path(cache, "vllm-fl", name) if os.path.isabs(cache) else None


def make_private(folder: Path) -> None:
    """Create a folder of the user's cache and its parent, with access for this user only."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def noting(what: str, *, named: bool = True) -> Iterator[None]:
    """Keep a note of `what` (`the import of plugin 'acme' of vllm-fl-acme 1.0`) while the block
    runs. Log it after `SLOW` seconds, unless the caller logs it (`named` is false) or the command
    that has set `FOLDER` does."""
    what = clean(what)[:1000]
    path = _write(what)
    _running.append(what)
    try:
        if named and FOLDER not in os.environ:
            with Watchdog(log) as watchdog, watchdog.over(what):
                yield
        else:
            yield
    finally:
        for crumb in _left():
            if crumb.what == what:  # it did not crash this time
                crumb.remove()
        if what in _running:  # not in a child that was forked in the block
            _running.remove(what)
        if path is not None and (fd := _notes.pop(path, None)) is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(fd)


def _write(what: str) -> Path | None:
    where, host, pid, when = folder(), os.uname().nodename, os.getpid(), time.time()
    if where is None:
        return None
    path, fd = where / f"{host}-{pid}-{time.time_ns()}.json", -1
    noted = {"what": what, "host": host, "pid": pid, "when": when, "prefix": sys.prefix}
    try:
        make_private(where)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, json.dumps(noted, ensure_ascii=False).encode(errors="replace"))
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    _notes[path] = fd
    return path


class Watchdog:
    def __init__(self, log: logging.Logger) -> None:
        self.seconds = 0.0
        """Duration of the last call."""
        self._log = log
        self._call: tuple[float, str] | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        thread = threading.Thread(target=self._name_slow_calls, name="vllm-fl watch", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Time the block as a call labelled `what`."""
        self._call = time.monotonic(), what
        try:
            yield
        finally:
            if self._call is not None:
                self.seconds = time.monotonic() - self._call[0]
                self._call = None

    def _name_slow_calls(self) -> None:
        named = None
        while not self._ended.wait(min(0.5, SLOW / 4)):
            call = self._call
            if call is not None and call is not named and time.monotonic() - call[0] >= SLOW:
                named = call
                text = "%s is still running after %.0f s"
                self._log.warning(text, call[1], SLOW)


def lost() -> tuple[Crumb, ...]:
    """Return the notes of dead processes of this environment, oldest first. The latest note of each
    process (its innermost code) and of each `what` is kept; others are deleted. `noting` removes
    the notes of code that later ends normally."""
    found: list[Crumb] = []
    for crumb in _crumbs(folder()):
        if crumb.lives or crumb.prefix != sys.prefix:
            continue
        # A server that restarts repeatedly leaves one file, not a thousand.
        for older in found[:]:
            if older.what == crumb.what or (older.host, older.pid) == (crumb.host, crumb.pid):
                found.remove(older)
                older.remove()
        found.append(crumb)
    return tuple(found)


_left = cache(lost)


def last(where: Path) -> Crumb | None:
    """Return the latest note in a folder, of a living or a dead process."""
    return next(reversed(_crumbs(where)), None)


def run_by(host: str, pid: int, since: float) -> str:
    """Return the third-party code that another process is running, or an empty text. `host` is the
    host of that process, because several hosts may share a home. Notes before `since`, a time after
    its start, are from a former process with this ID."""
    of_it = [c for c in _crumbs(folder()) if (c.host, c.pid) == (host, pid) and c.when >= since]
    return of_it[-1].what if of_it else ""


def _crumbs(where: Path | None) -> list[Crumb]:
    try:
        paths = [*where.iterdir()] if where is not None else []
    except OSError:
        return []
    found = [_read(path) for path in paths if path.suffix == ".json" and path not in _notes]
    return sorted(filter(None, found), key=lambda crumb: crumb.when)


def _read(path: Path) -> Crumb | None:
    """Read a note. Return None if it is invalid. An expired note is deleted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            lives = False
        except BlockingIOError:
            lives = True
        if not lives and time.time() - os.fstat(fd).st_mtime > FORGOTTEN:
            path.unlink()
            return None
        noted = json.loads(os.read(fd, LARGEST))
        what, host, prefix = (clean(str(noted[key])) for key in ("what", "host", "prefix"))
        return Crumb(what, host, int(noted["pid"]), float(noted["when"]), prefix, path, lives)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    finally:
        os.close(fd)
