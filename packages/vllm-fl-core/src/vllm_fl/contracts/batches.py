"""Batches of tokens as vLLM makes them: prompts one behind another, decoding in step, repeats.

What verification makes up has to be regular where vLLM's batches are, and irregular where they are:
positions run and jump back, tokens repeat, and no two rows of a batch lie a power of two apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["POOL", "STANDING_COUNTS", "Order", "positions", "rows", "tokens"]

POOL = 251
"""Rows of which batches consist. A prime: a kernel whose grid wraps at a power of two then takes
another row than its own."""

STANDING_COUNTS = (1, 5, 17, 300)
"""Token counts of calls whose batches cannot be made of a pool (`OpSpec.stands`): the last has
sequences beyond a second chunk of 64 tokens, and more than 16 sequences."""

Order = Literal["standing", "drawn", "repeated", "alike"]
"""How a batch takes the rows of a pool: one behind another as they stand there, from a drawn one
on, which is how vLLM would place them; in drawn order; drawn, each several times in a row, the
first of them twice; or one drawn row alone, as many times as there are tokens."""

_RUNS = (2, 1, 3, 8, 1, 1)
"""How often repeated rows follow themselves, in turn."""

_POWERS = tuple(2**n for n in range(11, 24))


def rows(count: int, pool: int, generator: torch.Generator, order: Order = "drawn") -> torch.Tensor:
    """The rows of a pool that make a batch.

    Args:
        count: tokens of the batch.
        pool: how many rows the pool has.
        generator: what draws; on the CPU.
        order: see `Order`. A drawn batch holds every row once before it holds one twice.

    Returns:
        (count,), int64, on the CPU: numbers from 0 to pool - 1.
    """
    import torch

    if order == "alike":
        return torch.randint(pool, (), generator=generator, device="cpu").repeat(count)
    if order == "standing":
        begin = torch.randint(pool, (), generator=generator, device="cpu")
        return (torch.arange(count, device="cpu") + begin) % pool
    drawn = torch.randperm(pool, generator=generator, device="cpu")
    if order == "repeated":
        times = torch.tensor(_RUNS, device="cpu").repeat(-(-pool // len(_RUNS)))[:pool]
        drawn = drawn.repeat_interleave(times)
    if count <= len(drawn):
        return drawn[:count]
    further = torch.randint(pool, (count - len(drawn),), generator=generator, device="cpu")
    return torch.cat((drawn, further))


def positions(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Where the tokens of one batch stand in their sequences.

    Prompts stand one behind another, so that positions run, jump back and run again. Between them
    stand sequences that decode: some at one position, some at the ends of what the model was made
    for and at powers of two. Of the prompts, one is the later part of a longer one.

    Args:
        count: tokens of the batch.
        length: the model's length; positions are below it.
        generator: what draws; on the CPU.

    Returns:
        (count,), int64, on the CPU.
    """
    import torch

    def drawn(low: int, high: int) -> int:
        end = max(low + 1, high)
        return int(torch.randint(low, end, (), generator=generator, device="cpu"))

    edges = [length - 1, *(p + d for p in _POWERS for d in (-1, 0) if p + d < length), 0]
    parts: list[torch.Tensor] = []
    missing, number = count, 0
    while missing > 0:
        kind = number % 4
        if kind == 2:  # decoding in step, and at the edges
            at = drawn(0, length)
            part = torch.tensor([at, at, at, *edges[number // 4 :: 2]], device="cpu")
        else:
            longest = min(length, 8 + count // 6)
            run = drawn(min(3, longest), longest + 1)
            begin = drawn(0, length - run + 1) if kind == 1 else 0
            part = torch.arange(begin, begin + run, device="cpu")
        parts.append(part[:missing])
        missing -= len(parts[-1])
        number += 1
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")


def tokens(count: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """The ids of the tokens of one batch: drawn, every other stretch of them with repeats.

    Args:
        count: tokens of the batch.
        vocabulary: how many ids there are.
        generator: what draws; on the CPU.

    Returns:
        (count,), int64, on the CPU.
    """
    import torch

    ids = torch.randint(vocabulary, (count,), generator=generator, device="cpu")
    for begin in range(0, count, 32):
        stretch = ids[begin : begin + 16]  # eight of one, eight of another, as in "aaaabbbb"
        stretch[:8], stretch[8:] = stretch[0].clone(), stretch[-1].clone()
    return ids
