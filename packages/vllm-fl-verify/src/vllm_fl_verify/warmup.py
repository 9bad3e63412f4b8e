"""Token counts of the warm-up, which compiles all kernels before the engine serves.

Just-in-time compilers compile a kernel for each kind of number among its arguments. Triton's kinds
are 1, multiples of 16, and all others. Libraries choose between kernels by size, mostly at powers
of two.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

KINDS = (16, 8, 4, 2, 1)
"""Kinds of numbers, by the largest power of two up to 16 that divides them."""


def warm_counts(
    largest: int, sizes: Iterable[int] = (), ceilings: Iterable[int] = (), seed: int = 0
) -> list[int]:
    """Return token counts of every kind in every bucket, distributed over the bucket.

    A kernel's argument is seldom the token count itself; it may be the count times heads, groups or
    features. Whether 16 divides it depends on how often 2 divides the count. So each bucket has an
    odd count and counts that are divisible by 2, 4, 8 and 16, if it is wide enough. Each is drawn
    from another fifth of the bucket, to find implementations with errors in a third of the bucket.
    The end of each bucket is included.

    Args:
        largest: the largest batch, in tokens.
        sizes: batches of exactly this size, such as captured graphs.
        ceilings: maximum tokens of table rows. They end buckets, as do powers of two and the
            largest batch.
        seed: for random choices.

    Returns:
        Distinct counts from 1 to `largest`: those in buckets, ascending, then those in `sizes`.
    """
    rng = random.Random(seed)
    powers = (1 << bits for bits in range(largest.bit_length()))
    ends = sorted({largest, *powers, *(n for n in ceilings if 1 <= n <= largest)})
    found = {*ends}
    for below, end in pairwise((0, *ends)):
        found |= _kinds(below, end, rng)
    return [*sorted(found), *sorted({n for n in sizes if 1 <= n <= largest} - found)]


def _kinds(below: int, end: int, rng: random.Random) -> set[int]:
    """Return counts in a bucket: a multiple of 16, and odd multiples of 8, 4, 2 and 1."""
    found, width = set(), end - below
    for part, step in enumerate(rng.sample(KINDS, len(KINDS))):
        fifth = below + width * part // 5, below + width * (part + 1) // 5
        if fitting := _of_kind(step, *fifth) or _of_kind(step, below, end):
            found.add(rng.choice(fitting))
    return found


def _of_kind(step: int, below: int, end: int) -> range:
    """Return the numbers of a kind above `below`, up to `end`."""
    period = step if step == KINDS[0] else 2 * step
    return range(below + 1 + (step - below - 1) % period, end + 1, period)
