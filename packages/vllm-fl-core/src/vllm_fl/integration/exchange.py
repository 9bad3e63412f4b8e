"""Gather a value from each rank of an engine or a group, on all of its ranks.

A rank that compiles a kernel may be minutes late, and gloo closes its connections after a time-out.
Therefore each rank announces its arrival in a store, and gloo gathers the values when all have
arrived. Until then the waiting ranks log late ranks and check that they are running.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import StartError
from ..logs import get_logger
from ..plugins import breadcrumb
from ..text import quote

T = TypeVar("T")

log = get_logger("engine")

TIMEOUT = timedelta(minutes=10)
"""The longest wait for other ranks. Other ranks may need minutes if their kernel cache is cold. If
a rank dies, the wait ends within seconds."""

LOGGED_AFTER = (10.0, 60.0, 300.0)

CHECKED_EVERY = 2.0

LONGEST_PAUSE = 0.25

UNUSED = 48
"""A message tag that is never sent."""


def exchange(what: str, mine: T, failure: str = "") -> list[T]:
    """Return the value of every rank in vLLM's world, in rank order. The data-parallel engines of a
    mixture of experts are one world. Errors report ranks of this world.

    Args:
        what: the purpose, such as `settle on a plan`. All ranks must make the same exchanges in the
            same order.
        mine: this rank's value; it is pickled.

    Raises:
        StartError: a rank has failed, died or is late, or ranks are at different steps. The error
            has `failures`.
    """
    from vllm.distributed.parallel_state import get_world_group

    try:
        found = gathered((what, failure, mine), get_world_group().cpu_group, what)
    except RuntimeError as error:
        raise StartError(str(error), failures=(str(error),)) from error
    steps = [step for step, _, _ in found]
    failures = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(found) if why]
    if not failures and len({*steps}) > 1:
        failures = [f"rank {n}: at a different step ({step})" for n, step in enumerate(steps)]
    if failures:
        text = f"vllm-fl: engine startup failed: {'; '.join(failures)}"
        raise StartError(text, failures=tuple(failures))
    return [value for _, _, value in found]


def gathered(mine: T, cpu_group: Any, what: str) -> list[T]:
    """Return the values of a group's ranks, in rank order. `cpu_group` has the gloo backend. `what`
    is the purpose, for the log and the error, such as `verify their kernels`. Raises RuntimeError,
    with the ranks, if a rank died or did not arrive in time."""
    ranks = _Ranks(cpu_group, what)
    found: list[Any] = [mine] * cpu_group.size()
    if not ranks.others:
        return found
    try:
        failure = ranks.wait()
        if not failure:
            dist.all_gather_object(found, mine, group=cpu_group)
    except RuntimeError as error:  # a dead process may have hosted the store
        failure = ranks.dead() or f"cannot reach them: {quote(error)}"
    if failure:
        waited = f"{ranks.names[ranks.here]} waited for the other ranks to {what}"
        raise RuntimeError(f"vllm-fl: {waited}, and {failure}")
    return found


class _Ranks:
    """The ranks of a group during one exchange, by their index. `store` is the group's store with a
    prefix for vllm-fl's keys, or None. `names` are the ranks by their global numbers, such as `rank
    3`."""

    def __init__(self, group: Any, what: str) -> None:
        self.group, self.what, self.here = group, what, group.rank()
        try:
            store = group.get_group_store()
        except RuntimeError:
            store = None
        self.store = store and dist.PrefixStore("vllm-fl", store)  # type: ignore[attr-defined]
        try:
            numbers = dist.get_process_group_ranks(group)
        except (KeyError, RuntimeError, ValueError):
            numbers = list(range(group.size()))
        self.names = [f"rank {number}" for number in numbers]
        self.others = [n for n in range(len(self.names)) if n != self.here]

    def wait(self) -> str:
        """Wait for all ranks to arrive. Return why the wait failed, or empty."""
        store, here = self.store, self.here
        if store is None:
            return ""
        turn = store.add(f"turn/{here}", 1)
        if turn == 1:
            process = os.uname().nodename, os.getpid(), time.time()
            store.set(f"process/{here}", json.dumps(process))
        else:  # all ranks have ended the last exchange
            store.delete_key(f"{turn - 1}/{here}")
        store.set(f"{turn}/{here}", "")
        given_up, arrivals = f"{turn}/given up", {n: f"{turn}/{n}" for n in self.others}
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
                    store.set(given_up, f"{self.names[here]} gave up: {failure}")
                    return failure
                if log_at and seconds >= log_at[0]:
                    log_at.pop(0)
                    self._log(late, seconds)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def dead(self) -> str:
        """Return a sentence about dead ranks. The result is empty if all ranks may still arrive."""
        dead = ", ".join(self._name(n) for n in self.others if not self._is_connected(n))
        return f"{dead} died. Its log, above, may show why" if dead else ""

    def _is_connected(self, n: int) -> bool:
        """Whether a rank is connected. The end of its process closes the connection, and `recv`
        then raises an error. Over an open connection `recv` returns at once."""
        try:
            self.group.recv([torch.empty(1)], n, UNUSED)
        except RuntimeError:
            return False
        return True

    def _log(self, late: list[int], seconds: float) -> None:
        if late and all(n > self.here or n in late for n in self.others):
            name, states = self.names[self.here].capitalize(), self._states(late)
            waited = "%s has waited %.0f s for the other ranks to %s: %s"
            log.info(waited, name, seconds, self.what, states)

    def _states(self, late: list[int]) -> str:
        processes = {n: self._process(n) for n in late}
        runs = {n: breadcrumb.run_by(*each) if each else "" for n, each in processes.items()}
        return "; ".join(f"{self._name(n)} is still running {runs[n]}".rstrip() for n in late)

    def _name(self, n: int) -> str:
        process = self._process(n)
        return self.names[n] + (f" (process {process[1]} on {process[0]})" if process else "")

    def _process(self, n: int) -> tuple[str, int, float] | None:
        """Return a rank's host, process id, and the time of its first exchange, or None if
        unknown."""
        key = f"process/{n}"
        try:
            if self.store is not None and self.store.check([key]):
                host, pid, published = json.loads(self.store.get(key))
                return host, pid, published
        except RuntimeError:
            pass
        return None
