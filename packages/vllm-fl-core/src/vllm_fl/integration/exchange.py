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
from typing import Any, TypeVar

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


def gathered(mine: T, cpu_group: Any, size: int, rank: int, what: str) -> list[T]:
    """Return the values of a group's ranks, in their order.

    Args:
        mine: this rank's value; it is pickled.
        cpu_group: torch.distributed's group, of its backend gloo.
        size: the number of its ranks.
        rank: this rank's number among all.
        what: the purpose of the exchange, for the log and the error: `verify their kernels`.

    Raises:
        RuntimeError: a rank died, or did not answer in time; the message says which.
    """
    import torch.distributed as dist

    if size == 1:
        return [mine]
    others = _Others(cpu_group, size, what)
    found: list[Any] = [None] * size
    try:
        failure = others.wait()
        if not failure:
            dist.all_gather_object(found, mine, group=cpu_group)
    except RuntimeError as error:  # a process that ended may have served the store
        failure = others.dead() or f"cannot reach them: {quote(error)}"
    if failure:
        raise RuntimeError(
            f"vllm-fl: rank {rank} waited for the other ranks to {what}, and {failure}"
        )
    return found


def introduce(cpu_group: Any) -> None:
    """Publish the process of this rank, which the other ranks name when this rank is late.

    The first exchange does so too; a rank that may be late for that one calls this before.
    """
    if (store := _store(cpu_group)) is not None:
        process = os.uname().nodename, os.getpid(), time.time()
        store.set(f"process/{cpu_group.rank()}", json.dumps(process))


def _store(cpu_group: Any) -> Any:
    """Return the store of a group, for our keys only; None if the group has no store."""
    import torch.distributed as dist

    try:
        store = cpu_group.get_group_store()
    except RuntimeError:  # another kind of group
        return None
    return store and dist.PrefixStore("vllm-fl", store)  # type: ignore[attr-defined]


class _Others:
    """The other ranks of a group at one exchange, by their numbers in the group.

    Args:
        group, size, what: as for `gathered`.
    """

    def __init__(self, group: Any, size: int, what: str) -> None:
        self.group, self.what, self.store = group, what, _store(group)
        self.here = group.rank()
        self.numbers = [n for n in range(size) if n != self.here]

    def wait(self) -> str:
        """Wait for all ranks to arrive; return the reason if the wait ended before that."""
        store, here = self.store, self.here
        if store is None:
            return ""
        turn = store.add(f"turn/{here}", 1)
        if turn == 1:
            introduce(self.group)
        else:  # all ranks have completed the last exchange, or given it up
            store.delete_key(f"{turn - 1}/{here}")
        store.set(f"{turn}/{here}", "")
        given_up, arrivals = f"{turn}/given up", {n: f"{turn}/{n}" for n in self.numbers}
        began, pause = time.monotonic(), 1e-4
        check_at, log_at = CHECKED_EVERY, list(LOGGED_AFTER)
        while True:
            if store.check([given_up]):
                return str(store.get(given_up), "utf-8")
            if store.check([*arrivals.values()]):
                return ""
            seconds = time.monotonic() - began
            if seconds >= check_at:
                check_at = seconds + CHECKED_EVERY
                late = [n for n, key in arrivals.items() if not store.check([key])]
                failure = self.dead()
                if late and not failure and seconds >= TIMEOUT.total_seconds():
                    failure = f"{self._states(late)} after {seconds:.0f} s"
                if failure:
                    store.set(given_up, f"{self._rank(here)} gave up: {failure}")
                    return failure
                if log_at and seconds >= log_at[0]:
                    log_at.pop(0)
                    self._log(late, seconds)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def dead(self) -> str:
        """Return the ranks that died, as a sentence; empty if all may still arrive."""
        dead = ", ".join(self._name(n) for n in self.numbers if not self._is_connected(n))
        return f"{dead} died. Its own log, above, may say why" if dead else ""

    def _is_connected(self, n: int) -> bool:
        """Return whether the connection with a rank is open, which the end of its process closes.

        To receive over a closed connection raises an error. Over an open one it returns at once.
        """
        import torch

        try:
            self.group.recv([torch.empty(1)], n, UNUSED)
        except RuntimeError:
            return False
        return True

    def _log(self, late: list[int], seconds: float) -> None:
        """Log the late ranks, on the first rank that has arrived."""
        if late and all(n > self.here or n in late for n in self.numbers):
            name, states = self._rank(self.here).capitalize(), self._states(late)
            waited = "%s has waited %.0f s for the other ranks to %s: %s"
            log.info(waited, name, seconds, self.what, states)

    def _states(self, late: list[int]) -> str:
        """Describe late ranks that are connected, with the foreign code that they run."""
        processes = {n: self._process(n) for n in late}
        runs = {n: breadcrumb.run_by(*each) if each else "" for n, each in processes.items()}
        return "; ".join(f"{self._name(n)} is still running {runs[n]}".rstrip() for n in late)

    def _name(self, n: int) -> str:
        process = self._process(n)
        return self._rank(n) + (f" (process {process[1]} on {process[0]})" if process else "")

    def _rank(self, n: int) -> str:
        """Return `rank 3`, by its number among all ranks."""
        import torch.distributed as dist

        try:
            return f"rank {dist.get_process_group_ranks(self.group)[n]}"
        except (KeyError, RuntimeError, ValueError):  # a group that torch does not list
            return f"rank {n}"

    def _process(self, n: int) -> tuple[str, int, float] | None:
        """Return a rank's host, process and time of its introduction, if it was introduced."""
        key = f"process/{n}"
        try:
            if self.store is not None and self.store.check([key]):
                host, pid, published = json.loads(self.store.get(key))
                return host, pid, published
        except RuntimeError:  # a store that cannot be reached
            pass
        return None
