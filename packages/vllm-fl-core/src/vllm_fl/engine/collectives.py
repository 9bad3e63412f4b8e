"""Verifies a communicator: every collective on known values, on all ranks of a group.

The values are small whole numbers, so that a sum has one right result in every dtype, whatever the
order in which the ranks are added.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..text import quote

__all__ = ["LIMIT", "fault_of", "steps"]

LIMIT = 120.0
"""Seconds for one step: making a group of many machines takes some; one that never ends is a
fault, and must be told from it."""

MANY = 64
"""Up to so many ranks the sums are exact in float16 and bfloat16."""

SHAPES = ((1, 1), (7, 33), (64, 1030))
"""Of what each rank gives: one element, odd sizes, and more than a small buffer holds."""

Step = Callable[[], str]
"""Empty, or the first thing that is wrong."""


def steps(
    communicator: Any, rank: int, size: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Step]]:
    """(dtype, step), in the same order on every rank. A step runs every collective.

    Every rank must run each step to its end before any rank runs the next one. A fault does not end
    a step, since the other ranks would wait for this one in what comes next.

    Args:
        communicator: an object with the methods of vLLM's `DeviceCommunicatorBase`.
        rank: this rank's place in the group.
        size: how many ranks the group has.
        device: where the tensors are.
        dtype: the model's; beside it float32 and int64 are tried, which vLLM exchanges too.
    """
    checks = _Checks(communicator, rank, size, device)
    for kind in dict.fromkeys((torch.float32, dtype, torch.int64)):
        if size <= MANY or kind.itemsize > 2:
            yield str(kind).removeprefix("torch."), partial(checks.fault, kind)


def fault_of(step: Callable[[], str | None], device: torch.device) -> tuple[str, bool]:
    """What is wrong with one step, and whether it is still running.

    It runs in a thread of its own, as one that waits for a lost rank may never end.

    Args:
        step: returns what is wrong, or nothing; what it raises is wrong, too.
        device: what the step's thread uses.
    """
    told: list[str] = []

    def run() -> None:
        try:
            if device.type != "cpu":
                torch.get_device_module(device.type).set_device(device)
            told.append(step() or "")
        except BaseException as error:  # a library's wrapper may raise anything
            told.append(quote(error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), daemon=True, name="vllm-fl groups")
    thread.start()
    thread.join(LIMIT)
    if thread.is_alive():
        return f"it did not end within {LIMIT:g} s", True
    return told[0], False


class _Checks:
    """The collectives of one communicator, by the names of vLLM's `DeviceCommunicatorBase`."""

    def __init__(self, communicator: Any, rank: int, size: int, device: torch.device) -> None:
        self.it, self.rank, self.size, self.device = communicator, rank, size, device

    def fault(self, dtype: torch.dtype) -> str:
        """The first thing that is wrong with a collective of this dtype, or nothing."""
        faults = []
        for name, check in self.of_dtype(dtype):
            try:
                why = check()
            except Exception as error:  # a library's wrapper may raise anything
                why = quote(error)
            if why:
                faults.append(f"{name}: {why}")
        return faults[0] if faults else ""

    def of_dtype(self, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], str]]]:
        """(name, check) of each collective on tensors of this dtype."""
        for shape in SHAPES:
            of = f"of {dtype} {list(shape)}".replace("torch.", "")
            yield f"all_reduce {of}", partial(self.all_reduce, shape, dtype)
            for dim in (0, -1):
                yield f"all_gather(dim={dim}) {of}", partial(self.all_gather, shape, dtype, dim)
                yield (
                    f"reduce_scatter(dim={dim}) {of}",
                    partial(self.reduce_scatter, shape, dtype, dim),
                )
            for last in {0, self.size - 1}:
                yield f"broadcast(src={last}) {of}", partial(self.broadcast, shape, dtype, last)
            yield f"gather {of}", partial(self.gather, shape, dtype)
            yield f"send and recv {of}", partial(self.ring, shape, dtype)
            yield f"all_gatherv {of}", partial(self.all_gatherv, shape, dtype)
            yield f"reduce_scatterv {of}", partial(self.reduce_scatterv, shape, dtype)

    def given(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What a rank gives: -1 to 4, which differs between neighbours."""
        count = int(torch.Size(shape).numel())
        whole = torch.arange(count, device=self.device) % 3 - 1 + rank % 4
        return whole.to(dtype).reshape(shape)

    def total(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The sum of what all ranks give."""
        whole = sum(self.given(r, shape, torch.int64) for r in range(self.size))
        assert isinstance(whole, torch.Tensor)
        return whole.to(dtype)

    def own(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.given(self.rank, shape, dtype)

    def all_reduce(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        return _compare(self.it.all_reduce(self.own(shape, dtype)), self.total(shape, dtype))

    def all_gather(self, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> str:
        wanted = torch.cat([self.given(r, shape, dtype) for r in range(self.size)], dim)
        return _compare(self.it.all_gather(self.own(shape, dtype), dim), wanted)

    def reduce_scatter(self, shape: tuple[int, ...], dtype: torch.dtype, dim: int) -> str:
        whole = list(shape)
        whole[dim] *= self.size
        wanted = self.total(tuple(whole), dtype).chunk(self.size, dim)[self.rank]
        return _compare(self.it.reduce_scatter(self.own(tuple(whole), dtype), dim), wanted)

    def broadcast(self, shape: tuple[int, ...], dtype: torch.dtype, src: int) -> str:
        return _compare(
            self.it.broadcast(self.own(shape, dtype), src), self.given(src, shape, dtype)
        )

    def gather(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        got = self.it.gather(self.own(shape, dtype), 0, -1)
        if self.rank != 0:
            return "" if got is None else "a rank that gathers nothing got a result"
        wanted = torch.cat([self.given(r, shape, dtype) for r in range(self.size)], -1)
        return _compare(got, wanted)

    def ring(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """To the next rank, from the one before: even ranks send first, as both calls block."""
        before = (self.rank - 1) % self.size
        received = None
        for sends in (True, False) if self.rank % 2 == 0 else (False, True):
            if sends:
                self.it.send(self.own(shape, dtype), (self.rank + 1) % self.size)
            else:
                received = self.it.recv(torch.Size(shape), dtype, before)
        return _compare(received, self.given(before, shape, dtype))

    def all_gatherv(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Ranks give unlike numbers of rows, as replicas with unlike batches do."""
        sizes = [1 + r % 3 for r in range(self.size)]
        parts = [self.given(r, (rows, *shape[1:]), dtype) for r, rows in enumerate(sizes)]
        try:
            got = self.it.all_gatherv(parts[self.rank], 0, sizes)
            pair = self.it.all_gatherv([parts[self.rank], parts[self.rank]], 0, sizes)
        except NotImplementedError:
            return ""  # vLLM's own base refuses it, too
        wanted = torch.cat(parts)
        return next(filter(None, (_compare(each, wanted) for each in (got, *pair))), "")

    def reduce_scatterv(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        sizes = [1 + r % 3 for r in range(self.size)]
        whole = (sum(sizes), *shape[1:])
        try:
            got = self.it.reduce_scatterv(self.own(whole, dtype), 0, sizes)
        except NotImplementedError:
            return ""
        return _compare(got, self.total(whole, dtype).split(sizes)[self.rank])


def _compare(got: Any, wanted: torch.Tensor) -> str:
    """What is wrong with a result: what it is, its shape, dtype, or the number of elements."""
    if not isinstance(got, torch.Tensor):
        return f"it returned {type(got).__name__}, not a tensor"
    form, right = (f"{each.dtype} {list(each.shape)}" for each in (got, wanted))
    if form != right:
        return f"it returned {form}, not {right}".replace("torch.", "")
    wrong = int((got != wanted).sum())
    return f"{wrong} of {wanted.numel()} elements are wrong" if wrong else ""
