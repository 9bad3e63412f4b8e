"""Note which foreign code is running: in a file, for a process that dies, and in the log, when it
takes long.

An import that calls `os._exit`, or a kernel that aborts, ends the process before anything can be
reported. Whatever is about to run is therefore noted in a small file in the user's cache, which the
next process and `vllm-fl doctor` read. A process locks its file for as long as it lives, so a file
that can be locked belongs to a dead process. Where no file can be written (no home, a full disk),
nothing is noted.

Environments and containers share a home. So a note says in which environment it was left and whose
code it is about; where that code is not installed, there is nothing to do, and nothing is told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..text import clean
from .installed import is_installed

log = logging.getLogger("vllm_fl.plugins")

SLOW = 10.0
"""Seconds after which what runs is named in the log."""

LARGEST = 16384
"""Bytes of a file that is read; nobody but us should write there."""

FORGOTTEN = 30 * 24 * 3600
"""Seconds after which a file is removed unread."""


@dataclass(frozen=True)
class Crumb:
    """What a process was running when it died without an error.

    Args:
        what: what ran, with the distribution at fault.
        pid: the process's number.
        when: seconds since the epoch at which it began.
        owner: the distribution and its version, or a module of its; empty where it is not known.
        prefix: the environment; empty where it is not known.
        session: the number of the process that leads the session.
        file: where it was noted.
    """

    what: str
    pid: int
    when: float
    owner: str = ""
    prefix: str = ""
    session: int = 0
    file: Path | None = None

    def __str__(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.when))
        return f"process {self.pid} ended on {at} while it ran {self.what}"

    @property
    def is_of_here(self) -> bool:
        """Whether it was left in this environment, by code that is installed here now."""
        return self.prefix in ("", sys.prefix) and _is_here(self.owner)


def _is_here(owner: str) -> bool:
    name, _, version = owner.partition(" ")
    if version:
        return is_installed(name, version)
    try:
        return not name or find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):  # a script's own module, which has no spec
        return True


def _host() -> str:
    """What the names of this machine's files begin with."""
    return f"{os.uname().nodename}-"


class _Notes:
    """This process's file, open and locked while something runs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stack: list[Crumb] = []
        self.fd: int | None = None
        self.path: Path | None = None
        self.kept = False
        """Whether the file is a caller's, which is not removed."""
        self.dead: dict[str, Crumb] | None = None

    def push(self, crumb: Crumb) -> None:
        with self.lock:
            self.stack.append(crumb)
            if self.fd is None:
                self._open()
            self._write()

    def pop(self, crumb: Crumb) -> None:
        with self.lock:
            if crumb in self.stack:
                self.stack.remove(crumb)
            if self.stack or self.kept:
                self._write()
            else:
                self._close()

    def heal(self, what: str) -> None:
        """Delete other processes' notes about what has just run to its end here."""
        if self.kept:  # `doctor` looks, and leaves what it finds
            return
        if self.dead is None:
            self.dead = {crumb.what: crumb for crumb in lost()}
        crumb = self.dead.pop(what, None)
        if crumb is not None:
            _remove(crumb.file)

    def _open(self) -> None:
        where = folder()
        if where is None:
            return
        path = where / f"{_host()}{os.getpid()}-{time.time_ns()}.json"
        fd = -1
        try:
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if fd >= 0:
                os.close(fd)
            return
        self.fd, self.path = fd, path

    def _write(self) -> None:
        if self.fd is None:
            return
        noted = ("what", "pid", "when", "owner", "prefix", "session")
        latest = [{name: getattr(crumb, name) for name in noted} for crumb in self.stack[-1:]]
        data = json.dumps(latest, ensure_ascii=False).encode(errors="replace")
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, data, 0)

    def _close(self) -> None:
        fd, path, self.fd, self.path = self.fd, self.path, None, None
        _remove(path)
        if fd is not None:
            os.close(fd)

    def start_clean_in_child(self) -> None:
        """The file is the parent's: a child that held it would keep its lock alive."""
        if self.fd is not None:
            os.close(self.fd)
        self.__init__()  # type: ignore[misc]


_notes = _Notes()
os.register_at_fork(after_in_child=_notes.start_clean_in_child)


def now() -> str:
    """What foreign code this process is running at this moment; empty where it is none."""
    return _notes.stack[-1].what if _notes.stack else ""


def folder() -> Path | None:
    """The folder of the notes, `~/.cache/vllm-fl/running`; None without a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # by the rules of XDG a relative one is none
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        cache = os.path.join(home, ".cache")
    return Path(cache, "vllm-fl", "running")


@contextlib.contextmanager
def running(what: str, owner: str = "", *, named: bool = True) -> Iterator[None]:
    """While the block runs, `what` is noted for the next process, and named after 10 seconds.

    Args:
        what: what runs and whose it is: `the import of plugin 'acme' of vllm-fl-acme 1.0`.
        owner: the distribution with its version, or the module, without which nobody shall be told
            of it: `vllm-fl-acme 1.0`, `acme_plugin`.
        named: False where the caller itself names what takes long.
    """
    crumb = _crumb(what, owner)
    what = crumb.what
    _notes.push(crumb)
    try:
        if not named or _notes.kept:  # a parent that keeps the notes says it itself
            yield
        else:
            with Watchdog(log) as watchdog, watchdog.over(what):
                yield
        _notes.heal(what)
    finally:
        _notes.pop(crumb)


def _crumb(what: str, owner: str) -> Crumb:
    here = os.getpid(), time.time(), clean(owner)[:200], sys.prefix, os.getsid(0)
    return Crumb(clean(what)[:1000], *here)


class Watchdog:
    """Names in the log what has been running for longer than `SLOW` seconds, from a thread.

    Args:
        log: where it is said.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.seconds = 0.0
        """What the last call took."""
        self._log = log
        self._call: tuple[float, str] | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        thread = threading.Thread(target=self._name_slow_calls, name="vllm-fl watch", daemon=True)
        with contextlib.suppress(RuntimeError):  # as while the interpreter ends
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """The block is one call, or whatever `what` says."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    def begin(self, what: str) -> None:
        """As `over`, for calls that are too short for a block."""
        self._call = time.monotonic(), what

    def end(self) -> None:
        """The call has come back."""
        if self._call is not None:
            self.seconds = time.monotonic() - self._call[0]
            self._call = None

    def _name_slow_calls(self) -> None:
        named = None
        while not self._ended.wait(min(0.5, SLOW / 4)):
            call = self._call
            if call is not None and call is not named and time.monotonic() - call[0] >= SLOW:
                named = call
                told = "%s has been running for %.0f s and has not come back yet"
                self._log.warning(told, call[1], SLOW)


def top_module(code: object) -> str:
    """The top package or module that a function or class comes from; empty where it has none."""
    return str(getattr(code, "__module__", None) or "").partition(".")[0]


@contextlib.contextmanager
def ending(pid: int) -> Iterator[None]:
    """The block ends a process, and the session that it leads: that is no fault of what they run.

    Their notes are removed. One of a process that had died before the block is kept.
    """
    before = {path for path in _paths() if _dead(path) is not None}
    try:
        yield
    finally:
        for path in _paths():
            if path in before or not path.name.startswith(_host()):
                continue
            crumb = _looked_into(path, _content)
            if crumb is not None and pid in (crumb.pid, crumb.session):
                _remove(path)


def keep_in(fd: int) -> None:
    """Note in this open file from now on: for a child whose parent looks there when it is gone."""
    _notes.fd, _notes.path, _notes.kept = fd, None, True


def read(data: bytes) -> Crumb | None:
    """What a file says was running, the innermost; None where it says nothing that we wrote."""
    try:
        entry: Any = json.loads(data)[-1]
        return Crumb(
            clean(str(entry["what"])),
            int(entry["pid"]),
            float(entry["when"]),
            clean(str(entry.get("owner", ""))),
            str(entry.get("prefix", "")),
            int(entry.get("session", 0)),
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def lost() -> tuple[Crumb, ...]:
    """What processes of this user were running when they ended, one for each `what`, by time.

    A process that lives is none of them, nor one of another environment, nor one that ran code
    which is not installed here. What has run to its end since is forgotten.
    """
    found: dict[str, Crumb] = {}
    dead = (crumb for path in _paths() if (crumb := _dead(path)) is not None and crumb.is_of_here)
    for crumb in sorted(dead, key=lambda crumb: crumb.when):
        # A server that is started again and again leaves one, not a thousand.
        if (older := found.pop(crumb.what, None)) is not None:
            _remove(older.file)
        found[crumb.what] = crumb
    return tuple(found.values())


def last(session: int) -> Crumb | None:
    """What a process of this session noted last, whether it lives or not.

    Args:
        session: the number of the process that leads it.
    """
    found = []
    for path in _paths():
        crumb = _looked_into(path, _content)
        if crumb is not None and crumb.session == session and crumb.is_of_here:
            found.append(dataclasses.replace(crumb, file=path))
    return max(found, key=lambda crumb: crumb.when, default=None)


def run_by(host: str, pid: int, since: float) -> str:
    """The foreign code that a process runs at this moment; empty if no note is found.

    Args:
        host: the name of its machine. Another machine may share the home of this one.
        pid: its number.
        since: a time after its start. Older notes are from another process with this number.
    """
    of_it = [path for path in _paths() if path.stem.rpartition("-")[0] == f"{host}-{pid}"]
    crumbs = [crumb for path in of_it if (crumb := _looked_into(path, _content)) is not None]
    for crumb in crumbs:
        if crumb.when >= since:
            return crumb.what
    return ""


def _paths() -> list[Path]:
    """The files of other processes."""
    where = folder()
    try:
        paths = sorted(where.iterdir()) if where is not None else []
    except OSError:
        return []
    return [path for path in paths if path.suffix == ".json" and path != _notes.path]


def _dead(path: Path) -> Crumb | None:
    """What the file of a process that is gone says; None where it lives, or left nothing."""

    def locked(fd: int) -> Crumb | None:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        crumb = _content(fd)
        age = time.time() - os.fstat(fd).st_mtime
        # An empty one may be that of a process which is about to lock it.
        if age > (FORGOTTEN if crumb is not None else 60):
            path.unlink()
            return None
        return crumb

    crumb = _looked_into(path, locked)
    return None if crumb is None else dataclasses.replace(crumb, file=path)


def _remove(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _content(fd: int) -> Crumb | None:
    return read(os.read(fd, LARGEST))


def _looked_into(path: Path, look: Callable[[int], Crumb | None]) -> Crumb | None:
    """What `look` finds in a file; None where it cannot be opened, or not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return look(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
