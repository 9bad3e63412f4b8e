"""Batches of tokens as vLLM makes them: consecutive prompts, decoding sequences, repeats.

Positions increase and jump back. Tokens repeat. Rows at distances of a power of two differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

POOL = 251
"""Number of distinct rows in batches. It is a prime, so a kernel with a grid that wraps at a power
of two reads a different row."""

FIXED_COUNTS = (1, 5, 17, 300)
"""Token counts of calls with fixed batches (`OpSpec.fixed_batch`). The last batch has more than 16
sequences. Its first sequence is longer than two chunks of 64 tokens."""

Order = Literal["consecutive", "drawn", "repeated", "alike"]
"""Order of a batch's rows. `consecutive`: from a random row on, as in vLLM. `drawn`: in random
order. `repeated`: in random order; some rows, including the first, are repeated at once. `alike`:
the same random row for all tokens.
"""

_RUNS = (2, 1, 3, 8, 1, 1)


def rows(count: int, pool: int, generator: torch.Generator, order: Order = "drawn") -> torch.Tensor:
    """Return the rows of a pool that make a batch.

    A drawn batch contains every row before it repeats a row.

    Args:
        order: see `Order`.

    Returns:
        (count,), int64, on the CPU; numbers from 0 to pool - 1.
    """
    import torch

    if order == "alike":
        return torch.randint(pool, (), generator=generator, device="cpu").repeat(count)
    if order == "consecutive":
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
    """Return random token ids of a batch: (count,), int64, on the CPU. The first 16 of every 32 ids
    contain repeats.
    """
    import torch

    ids = torch.randint(vocabulary, (count,), generator=generator, device="cpu")
    for begin in range(0, count, 32):
        stretch = ids[begin : begin + 16]  # eight of each of two ids, like "aaaabbbb"
        stretch[:8], stretch[8:] = stretch[0].clone(), stretch[-1].clone()
    return ids
