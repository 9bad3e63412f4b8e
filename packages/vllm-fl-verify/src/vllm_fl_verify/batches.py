"""Batches of tokens as vLLM makes them: prompts one behind another, decoding in step, repeats.

What verification makes up has to be regular where vLLM's batches are, and irregular where they are:
positions run and jump back, tokens repeat, and no two rows of a batch lie a power of two apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["POOL", "STANDING_COUNTS", "Order", "rows", "tokens"]

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
