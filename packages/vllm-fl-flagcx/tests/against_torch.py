"""A communicator's collectives against torch.distributed, on random values. The reference is the
default group: gloo for tensors in host memory, NCCL on GPUs."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MOVED", "SUMMED", "as_bytes", "compare", "drawn", "gathered", "same", "total_of"]

SUMMED = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
MOVED = (*SUMMED, torch.bool, torch.int16, torch.float8_e4m3fn)


def drawn(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device
) -> torch.Tensor:
    """Random values with known bits of their sums. A sum of two rounds once. For more ranks the
    values are eighths: a sum of eight is exact in every summed dtype, in any order."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point and dist.get_world_size() > 2:
        values = (torch.randint(-32, 33, shape, generator=generator) / 8).to(dtype)
    elif dtype.is_floating_point:
        values = (4 * torch.randn(shape, generator=generator)).to(dtype)
    else:
        values = torch.randint(-100, 100, shape, generator=generator).to(dtype)
    return values.to(device)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    forms = [(each.shape, each.dtype) for each in (got, wanted)]
    return forms[0] == forms[1] and torch.equal(as_bytes(got), as_bytes(wanted))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)  # an empty tensor may have any stride
    return tensor.contiguous().flatten().view(torch.uint8)


def total_of(mine: torch.Tensor) -> torch.Tensor:
    total = mine.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def gathered(mine: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    """All ranks' tensors, moved as bytes."""
    found = []
    for src, count in enumerate(rows):
        part = mine if dist.get_rank() == src else mine.new_empty((count, *mine.shape[1:]))
        moved = as_bytes(part).to(mine.device)
        if moved.numel():
            dist.broadcast(moved, src)
        found.append(moved.view(mine.dtype).view(part.shape))
    return found


def compare(it: Any, rank: int, count: int, device: torch.device, *, large: int, every: int) -> str:
    """Compare every collective, with one dtype for sums and one for moves, on `count` sizes: about
    `large` elements for one size in `every`, a few hundred for the others. Returns the first size
    with a difference and the difference, or ""."""
    rng = random.Random(20261122)
    size = dist.get_world_size()
    behind, ahead = (rank - 1) % size, (rank + 1) % size
    for case in range(count):
        summed, moved = SUMMED[case % len(SUMMED)], MOVED[case % len(MOVED)]
        most = large if case % every == 0 else 300
        rows, columns = size * rng.randint(1, 12), rng.randint(1, max(1, most // 12))
        uneven = [rng.randint(0, 5), *(rng.randint(1, 5) for _ in range(size - 1))]
        dim, root = rng.choice([0, 1, -1]), rng.randint(0, size - 1)
        mine = drawn((rows, size * columns), summed, size * case + rank, device)
        if case % 3 == 0:
            mine = mine.t().contiguous().t()  # not contiguous
        wrong = []

        def check(name: str, got: Any, wanted: torch.Tensor, wrong: list[str] = wrong) -> None:
            if not isinstance(got, torch.Tensor) or not same(got, wanted):
                wrong.append(name)

        total = total_of(mine)
        before = mine.clone()
        check("all_reduce", it.all_reduce(mine), total)
        check("all_reduce changed its input", mine, before)
        check("reduce_scatter", it.reduce_scatter(mine, dim), total.chunk(size, dim)[rank])
        whole = drawn((sum(uneven), columns), summed, 7 * case + rank, device)
        part = total_of(whole).split(uneven)[rank]
        check("reduce_scatterv", it.reduce_scatterv(whole, 0, uneven), part)
        into = torch.empty_like(part)
        it.reduce_scatterv_into_output(whole, into, 0, uneven)
        check("reduce_scatterv_into_output", into, part)

        mine = drawn((rows, columns), moved, 3 * case + rank, device)
        all_of = gathered(mine, [rows] * size)
        check("all_gather", it.all_gather(mine, dim), torch.cat(all_of, dim))
        got = it.gather(mine, root, dim)
        if rank == root:
            check("gather", got, torch.cat(all_of, dim))
        elif got is not None:
            wrong.append("gather where nothing is gathered")
        turned = mine.clone().t()
        check("broadcast", it.broadcast(turned, root), all_of[root].t())
        check("broadcast in place", turned, all_of[root].t())
        other = drawn((uneven[rank], columns), moved, 5 * case + rank, device)
        parts = gathered(other, uneven)
        check("all_gatherv", it.all_gatherv(other, 0, uneven), torch.cat(parts))
        for got in it.all_gatherv([other, other], 0, uneven):
            check("all_gatherv of a list", got, torch.cat(parts))
        if rank == root:
            it.send(mine)
        if behind == root:
            check("recv", it.recv(mine.shape, mine.dtype), all_of[root])
        received = torch.empty_like(mine)
        it.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, ahead), dist.P2POp(dist.irecv, received, behind)]
        )
        check("batch_isend_irecv", received, all_of[behind])
        if wrong:
            return f"case {case}, {summed} and {moved}, {rows}x{columns}, {uneven}: {wrong}"
    return ""
