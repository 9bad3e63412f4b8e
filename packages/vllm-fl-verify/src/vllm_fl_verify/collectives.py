"""Verifies a communicator: every collective on known values, on all ranks of a group.

The values are small integers, so a sum has one correct result in every dtype and order of ranks.
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
"""Maximum ranks for exact sums in float16 and bfloat16."""

SHAPES = ((1, 1), (7, 33), (64, 1030))
"""Shapes of each rank's tensor: one element, odd sizes, and more than a small buffer."""

OPTIONAL = ("all_gatherv", "reduce_scatterv")
"""Collectives that vLLM's base class does not support either."""

RING = "send and recv"

Shape = Sequence[int]

Step = Callable[[], str]


def steps(
    communicator: Any, rank: int, size: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Step]]:
    """Yield (dtype, step) in the same order on every rank. A step runs every collective.

    All ranks must finish a step before a rank starts the next step. A step continues after an
    error, because the other ranks would wait in the next collective.

    Args:
        communicator: an object with the methods of vLLM's `DeviceCommunicatorBase`.
        dtype: the model's dtype. vLLM also exchanges float32 and int64, so these are verified as
            well.
    """
    for kind in dict.fromkeys((torch.float32, dtype, torch.int64)):
        if size <= MANY or kind.itemsize > 2:
            each = _Collectives(communicator, rank, size, device, kind)
            yield str(kind).removeprefix("torch."), each.fault


@dataclass(frozen=True)
class _Collectives:
    it: Any
    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    def fault(self) -> str:
        faults = []
        for shape in SHAPES:
            of = f" of {self.dtype} {[*shape]}".replace("torch.", "")
            for name, args, wanted in self.calls(shape):
                try:
                    call = self.ring if name == RING else getattr(self.it, name.partition("(")[0])
                    why = _compare(call(*args), wanted)
                except NotImplementedError as error:
                    why = "" if name in OPTIONAL else quote(error)
                except Exception as error:  # a library's wrapper may raise anything
                    why = quote(error)
                if why:
                    faults.append(f"{name}{of}: {why}")
        return faults[0] if faults else ""

    def calls(self, shape: Shape) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
        own, size, rank = partial(self.given, self.rank), self.size, self.rank
        every = [self.given(r, shape) for r in range(size)]
        yield "all_reduce", (own(shape),), self.total(shape)
        for dim in (0, -1):
            name = f"(dim={dim})"
            yield f"all_gather{name}", (own(shape), dim), torch.cat(every, dim)
            whole = [*shape]
            whole[dim] *= size
            mine = self.total(whole).chunk(size, dim)[rank]
            yield f"reduce_scatter{name}", (own(whole), dim), mine
        for src in {0, size - 1}:
            yield f"broadcast(src={src})", (own(shape), src), every[src]
        gathered = torch.cat(every, -1) if rank == 0 else None
        yield "gather", (own(shape), 0, -1), gathered
        yield RING, (shape,), every[rank - 1]
        # Ranks have different numbers of rows, like replicas with different batches.
        sizes = [1 + r % 3 for r in range(size)]
        parts = [self.given(r, (rows, *shape[1:])) for r, rows in enumerate(sizes)]
        both = torch.cat(parts)
        yield "all_gatherv", (parts[rank], 0, sizes), both
        yield "all_gatherv", ([parts[rank]] * 2, 0, sizes), [both, both]
        whole = [sum(sizes), *shape[1:]]
        mine = self.total(whole).split(sizes)[rank]
        yield "reduce_scatterv", (own(whole), 0, sizes), mine

    def given(self, rank: int, shape: Shape) -> torch.Tensor:
        """Return a rank's tensor: numbers from -1 to 4. The tensors of neighbouring ranks
        differ."""
        count = int(torch.Size(shape).numel())
        whole = torch.arange(count, device=self.device) % 3 - 1 + rank % 4
        return whole.to(self.dtype).reshape(*shape)

    def total(self, shape: Shape) -> torch.Tensor:
        given = torch.stack([self.given(r, shape) for r in range(self.size)])
        return given.sum(0, dtype=self.dtype)

    def ring(self, shape: Shape) -> Any:
        """Send to the next rank, and return what the previous rank sent. Both calls block, so even
        ranks send first."""
        received = None
        for sends in (True, False) if self.rank % 2 == 0 else (False, True):
            if sends:
                self.it.send(self.given(self.rank, shape), (self.rank + 1) % self.size)
            else:
                before = (self.rank - 1) % self.size
                received = self.it.recv(torch.Size(shape), self.dtype, before)
        return received


def _compare(got: Any, wanted: Any) -> str:
    """Return why a result is incorrect: type, shape, dtype, or number of incorrect elements."""
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
