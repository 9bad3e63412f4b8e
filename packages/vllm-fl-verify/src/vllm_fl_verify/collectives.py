"""Verifies a communicator: every collective on known values, on all ranks of a group.

The values are small whole numbers, so that a sum has one right result in every dtype, whatever the
order in which the ranks are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any

import torch

from vllm_fl.text import quote

MANY = 64
"""Up to so many ranks the sums are exact in float16 and bfloat16."""

SHAPES = ((1, 1), (7, 33), (64, 1030))
"""Of what each rank gives: one element, odd sizes, and more than a small buffer holds."""

OPTIONAL = ("all_gatherv", "reduce_scatterv")
"""What vLLM's own base refuses, too."""

Shape = Sequence[int]

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
    for kind in dict.fromkeys((torch.float32, dtype, torch.int64)):
        if size <= MANY or kind.itemsize > 2:
            each = _Collectives(communicator, rank, size, device, kind)
            yield str(kind).removeprefix("torch."), each.fault


@dataclass(frozen=True)
class _Collectives:
    """Those of one communicator, by the names of vLLM's `DeviceCommunicatorBase`, on tensors of
    one dtype."""

    it: Any
    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    def fault(self) -> str:
        """The first thing that is wrong with a collective, or nothing."""
        faults = []
        for shape in SHAPES:
            of = f" of {self.dtype} {[*shape]}".replace("torch.", "")
            for name, method, args, wanted in self.calls(shape):
                try:
                    call = getattr(self.it, method) if isinstance(method, str) else method
                    why = _compare(call(*args), wanted)
                except NotImplementedError as error:
                    why = "" if name in OPTIONAL else quote(error)
                except Exception as error:  # a library's wrapper may raise anything
                    why = quote(error)
                if why:
                    faults.append(f"{name}{of}: {why}")
        return faults[0] if faults else ""

    def calls(
        self, shape: Shape
    ) -> Iterator[tuple[str, str | Callable[[], Any], tuple[Any, ...], Any]]:
        """(name, method, arguments, right result) of each collective."""
        own, size, rank = partial(self.given, self.rank), self.size, self.rank
        every = [self.given(r, shape) for r in range(size)]
        yield "all_reduce", "all_reduce", (own(shape),), self.total(shape)
        for dim in (0, -1):
            name = f"(dim={dim})"
            yield f"all_gather{name}", "all_gather", (own(shape), dim), torch.cat(every, dim)
            whole = [*shape]
            whole[dim] *= size
            mine = self.total(whole).chunk(size, dim)[rank]
            yield f"reduce_scatter{name}", "reduce_scatter", (own(whole), dim), mine
        for src in {0, size - 1}:
            yield f"broadcast(src={src})", "broadcast", (own(shape), src), every[src]
        gathered = torch.cat(every, -1) if rank == 0 else None
        yield "gather", "gather", (own(shape), 0, -1), gathered
        yield "send and recv", partial(self.ring, shape), (), every[rank - 1]
        # Ranks give unlike numbers of rows, as replicas with unlike batches do.
        sizes = [1 + r % 3 for r in range(size)]
        parts = [self.given(r, (rows, *shape[1:])) for r, rows in enumerate(sizes)]
        both = torch.cat(parts)
        yield "all_gatherv", "all_gatherv", (parts[rank], 0, sizes), both
        yield "all_gatherv", "all_gatherv", ([parts[rank]] * 2, 0, sizes), [both, both]
        whole = [sum(sizes), *shape[1:]]
        mine = self.total(whole).split(sizes)[rank]
        yield "reduce_scatterv", "reduce_scatterv", (own(whole), 0, sizes), mine

    def given(self, rank: int, shape: Shape) -> torch.Tensor:
        """What a rank gives: -1 to 4, which differs between neighbours."""
        count = int(torch.Size(shape).numel())
        whole = torch.arange(count, device=self.device) % 3 - 1 + rank % 4
        return whole.to(self.dtype).reshape(*shape)

    def total(self, shape: Shape) -> torch.Tensor:
        """The sum of what all ranks give."""
        return torch.stack([self.given(r, shape) for r in range(self.size)]).sum(
            0, dtype=self.dtype
        )

    def ring(self, shape: Shape) -> Any:
        """What comes from the rank before, while the next one is sent to.

        Even ranks send first, as both calls block.
        """
        received = None
        for sends in (True, False) if self.rank % 2 == 0 else (False, True):
            if sends:
                self.it.send(self.given(self.rank, shape), (self.rank + 1) % self.size)
            else:
                before = (self.rank - 1) % self.size
                received = self.it.recv(torch.Size(shape), self.dtype, before)
        return received


def _compare(got: Any, wanted: Any) -> str:
    """What is wrong with a result: what it is, its shape, dtype, or the number of elements."""
    if isinstance(wanted, list):
        return next(filter(None, starmap(_compare, zip(got, wanted, strict=True))), "")
    if wanted is None:
        return "" if got is None else "a rank that is not the destination got a result"
    if not isinstance(got, torch.Tensor):
        return f"it returned {type(got).__name__}, not a tensor"
    form, right = (f"{each.dtype} {list(each.shape)}" for each in (got, wanted))
    if form != right:
        return f"it returned {form}, not {right}".replace("torch.", "")
    wrong = int((got != wanted).sum())
    return f"{wrong} of {wanted.numel()} elements are incorrect" if wrong else ""
