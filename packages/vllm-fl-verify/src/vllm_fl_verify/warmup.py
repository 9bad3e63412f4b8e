"""The token counts of the warm-up: no kernel is left to compile while the engine serves.

A kernel that is compiled when it is called is compiled anew for another kind of number among its
arguments. Triton's kinds are 1, the multiples of 16, and all others; libraries around it choose
between kernels by size, mostly at powers of two.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

KINDS = (16, 8, 4, 2, 1)
"""What divides a number, and no larger one does but multiples of 16: Triton asks of an integer
whether 16 divides it."""


def warm_counts(
    largest: int, sizes: Iterable[int] = (), ceilings: Iterable[int] = (), seed: int = 0
) -> list[int]:
    """Token counts of every kind of number in every bucket, spread over the bucket.

    What a kernel is passed is seldom the count itself: it may be the count times heads, or groups,
    or a row's features. Whether 16 divides that depends on how often 2 divides the count. So each
    bucket has an odd count, and one that 2, 4, 8 and 16 divide, where it is wide enough. Each is
    drawn from another fifth of the bucket: an implementation that is wrong in a third of it is
    called there. The end of each bucket is among them.

    Args:
        largest: the largest batch, in tokens.
        sizes: batches that are run at exactly this size, as captured graphs are.
        ceilings: counts up to which something else is chosen. They end buckets, as powers of two
            and the largest batch do.
        seed: for the draw.

    Returns:
        Counts from 1 to `largest`, each once: those of the buckets, ascending, then those of
        `sizes`, which bring no further kind.
    """
    rng = random.Random(seed)
    powers = (1 << bits for bits in range(largest.bit_length()))
    ends = sorted({largest, *powers, *(n for n in ceilings if 1 <= n <= largest)})
    found = {*ends}
    for below, end in pairwise((0, *ends)):
        found |= _kinds(below, end, rng)
    return [*sorted(found), *sorted({n for n in sizes if 1 <= n <= largest} - found)]


def _kinds(below: int, end: int, rng: random.Random) -> set[int]:
    """Counts in a bucket: one that 16 divides, and others that 8, 4, 2 and 1 divide and no more."""
    found, width = set(), end - below
    for part, step in enumerate(rng.sample(KINDS, len(KINDS))):
        fifth = below + width * part // 5, below + width * (part + 1) // 5
        if fitting := _of_kind(step, *fifth) or _of_kind(step, below, end):
            found.add(rng.choice(fitting))
    return found


def _of_kind(step: int, below: int, end: int) -> range:
    """The numbers of a kind that are above `below`, up to `end`."""
    period = step if step == KINDS[0] else 2 * step
    return range(below + 1 + (step - below - 1) % period, end + 1, period)
