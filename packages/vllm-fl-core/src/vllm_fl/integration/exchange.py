"""An exchange between the ranks of a group: each gives a value, and gets the values of all.

A rank that compiles a kernel may be minutes late, and gloo closes its connections after a time-out.
So each rank announces in the group's store that it has arrived, and the exchange begins when all
have. Until then the ranks that wait log which ranks are late, and check whether these still run.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..logs import get_logger
from ..plugins import breadcrumb
from ..text import quote

T = TypeVar("T")

log = get_logger("engine")

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others: with a cold kernel cache one of them may need minutes. The
wait ends within seconds if one of them dies."""

LOGGED_AFTER = (10.0, 60.0, 300.0)
"""Seconds of waiting after which the late ranks are logged."""

CHECKED_EVERY = 2.0
"""Seconds between two checks whether the late ranks still run."""

LONGEST_PAUSE = 0.25
"""Seconds between two looks into the store, at most."""

UNUSED = 48
"""A tag of messages that no message has."""


class Process(NamedTuple):
    """The process of a rank.

    Attributes:
        host: the name of its machine.
        pid: its number.
        space: the boot and the namespace that `pid` belongs to; empty if unknown.
        began: the time at which it began, in clock ticks since the boot; empty if unknown.
        published: seconds since the epoch.
    """

    host: str
    pid: int
    space: str
    began: str
    published: float

    @classmethod
    def of_this_rank(cls) -> Process:
        pid = os.getpid()
        return cls(os.uname().nodename, pid, _space(), _began(pid), time.time())

    @property
    def is_alive(self) -> bool | None:
        """Whether it still runs; None if that cannot be seen from here."""
        is_here = (self.host, self.space) == (os.uname().nodename, _space())
        if not (is_here and self.space and self.began):
            return None
        return _began(self.pid) == self.began


@cache
def _space() -> str:
    """The boot and the namespace of this process; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process of this namespace began; empty if it has ended, or that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def gathered(mine: T, cpu_group: Any, size: int, rank: int, what: str) -> list[T]:
    """What every rank of a group gives, in the order of the ranks.

    Args:
        mine: what this rank gives; it is pickled.
        cpu_group: torch.distributed's group, of its backend gloo.
        size: how many ranks it has.
        rank: this rank's number among all.
        what: the purpose of the exchange, for the log and the error: `verify their kernels`.

    Raises:
        RuntimeError: a rank died, or did not answer in time; the message says which.
    """
    import torch.distributed as dist

    if size == 1:
        return [mine]
    waited = f"vllm-fl: rank {rank} waited for the other ranks to {what}, and"
    store = _store(cpu_group)
    failure = _Arrivals(store, cpu_group, size, what).wait() if store is not None else ""
    if failure:
        raise RuntimeError(f"{waited} {failure}")
    told: list[Any] = [None] * size
    try:
        dist.monitored_barrier(cpu_group, timeout=TIMEOUT, wait_all_ranks=True)
        dist.all_gather_object(told, mine, group=cpu_group)
    except RuntimeError as error:
        names = _names(cpu_group, size)
        gone = [names[n] for n in range(size) if not _is_connected(cpu_group, n)]
        named = f" ({', '.join(gone)})" if gone else ""
        raise RuntimeError(
            f"{waited} one of them is gone{named}: {error}. Its own log, above, may say why."
        ) from error
    return told


def introduce(cpu_group: Any) -> None:
    """Publish the process of this rank, which the other ranks check when this rank is late.

    The first exchange does so too; a rank that may be late for that one calls this before.
    """
    store = _store(cpu_group)
    if store is not None:
        store.set(f"process/{cpu_group.rank()}", json.dumps(Process.of_this_rank()))


def _store(cpu_group: Any) -> Any:
    """The store of a group, for our keys only; None if the group has no store."""
    import torch.distributed as dist

    try:
        store = cpu_group.get_group_store()
    except (AttributeError, RuntimeError):  # another kind of group, or an older torch
        return None
    if store is None:
        return None
    return dist.PrefixStore("vllm-fl", store)  # type: ignore[attr-defined]


def _names(cpu_group: Any, size: int) -> list[str]:
    """The ranks of a group, each with its number among all."""
    import torch.distributed as dist

    try:
        numbers = dist.get_process_group_ranks(cpu_group)
    except (KeyError, RuntimeError, ValueError):  # a group that torch does not list
        numbers = list(range(size))
    return [f"rank {number}" for number in numbers]


def _is_connected(cpu_group: Any, n: int) -> bool:
    """Whether the connection with a rank of the group is open; true for this rank.

    To receive over a closed connection raises an error. Over an open one it returns at once.
    """
    import torch

    try:
        if n != cpu_group.rank():
            cpu_group.recv([torch.empty(1)], n, UNUSED)
    except RuntimeError:
        return False
    return True


class _Arrivals:
    """The arrivals of a group's ranks at one exchange. Keys have the number of a rank in the group.

    Args:
        store: the store of the group, from `_store`.
        group, size, what: as for `gathered`.
    """

    def __init__(self, store: Any, group: Any, size: int, what: str) -> None:
        self.store, self.group, self.what = store, group, what
        self.here = group.rank()
        self.others = [n for n in range(size) if n != self.here]
        self.names = _names(group, size)
        self.turn = 0
        """The number of this exchange, counted for each group."""
        self.processes: dict[int, Process] = {}

    def wait(self) -> str:
        """Wait for all ranks to arrive.

        Returns:
            The reason if the wait ended before that, or empty.
        """
        try:
            self._arrive()
            return self._wait()
        except RuntimeError as error:  # a process that ended may have served the store
            dead = self._dead()
            return dead or f"the group's store cannot be reached: {quote(error)}"

    def _arrive(self) -> None:
        self.turn = self.store.add(f"turn/{self.here}", 1)
        if self.turn == 1:
            introduce(self.group)
        else:  # all ranks have completed the last exchange, or given it up
            self.store.delete_key(f"{self.turn - 1}/{self.here}")
        self.store.set(self._key(self.here), "")

    def _key(self, n: int) -> str:
        return f"{self.turn}/{n}"

    def _wait(self) -> str:
        given_up, arrivals = f"{self.turn}/given up", [self._key(n) for n in self.others]
        began, pause = time.monotonic(), 1e-4
        check_at, log_at = CHECKED_EVERY, list(LOGGED_AFTER)
        while True:
            if self.store.check([given_up]):
                return str(self.store.get(given_up), "utf-8")
            if self.store.check(arrivals):
                return ""
            seconds = time.monotonic() - began
            if seconds >= check_at:
                check_at = seconds + CHECKED_EVERY
                late = [n for n in self.others if not self.store.check([self._key(n)])]
                failure = self._dead()
                if late and not failure and seconds >= TIMEOUT.total_seconds():
                    failure = f"{self._states(late)} after {seconds:.0f} s"
                if failure:
                    self.store.set(given_up, f"{self.names[self.here]} gave up: {failure}")
                    return failure
                if log_at and seconds >= log_at[0]:
                    log_at.pop(0)
                    self._log(late, seconds)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _log(self, late: list[int], seconds: float) -> None:
        """Log the late ranks, on the first rank that has arrived."""
        if late and all(n > self.here or n in late for n in self.others):
            name, states = self.names[self.here].capitalize(), self._states(late)
            waited = "%s has waited %.0f s for the other ranks to %s: %s"
            log.info(waited, name, seconds, self.what, states)

    def _dead(self) -> str:
        """The other ranks that died, as a sentence; empty if all may still arrive."""
        dead = ", ".join(self._name(n) for n in self.others if not self._may_arrive(n))
        return f"{dead} died. Its own log, above, may say why" if dead else ""

    def _may_arrive(self, n: int) -> bool:
        lives = self._lives(n)
        return _is_connected(self.group, n) if lives is None else lives

    def _states(self, late: list[int]) -> str:
        return "; ".join(map(self._state, late))

    def _state(self, n: int) -> str:
        """The state of a late rank, with the foreign code that it runs."""
        process = self._process(n)
        runs = breadcrumb.run_by(process.host, process.pid, process.published) if process else ""
        if runs or self._lives(n):
            return f"{self._name(n)} is still running{runs and f' {runs}'}"
        return f"{self._name(n)} has not arrived, and is still connected"

    def _name(self, n: int) -> str:
        process = self._process(n)
        return self.names[n] + (f" (process {process.pid} on {process.host})" if process else "")

    def _lives(self, n: int) -> bool | None:
        process = self._process(n)
        return process.is_alive if process else None

    def _process(self, n: int) -> Process | None:
        """The process of a rank; None if it has not been introduced."""
        key = f"process/{n}"
        try:
            if n not in self.processes and self.store.check([key]):
                self.processes[n] = Process(*json.loads(self.store.get(key)))
        except RuntimeError:  # `wait` handles a store that cannot be reached
            pass
        return self.processes.get(n)
