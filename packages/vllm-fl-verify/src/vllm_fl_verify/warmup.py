"""The token counts that a start calls, so that no kernel is left to compile while it serves.

A kernel that is compiled when it is called is compiled anew for another kind of number among its
arguments. Triton's kinds are 1, the multiples of 16, and all others; libraries around it choose
between kernels by size, mostly at powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

ALIGNMENT = 16
"""What Triton asks of an integer and of an address: whether this divides it."""


def warm_counts(largest: int, sizes: Iterable[int] = (), ceilings: Iterable[int] = ()) -> list[int]:
    """Token counts that between them bring every kind of number, in every bucket.

    What a kernel is passed is seldom the count itself: it may be the count times heads, or groups,
    or a row's features. Whether 16 divides that depends on how often 2 divides the count. So each
    bucket has an odd count, and one that 2, 4, 8 and 16 divide, where it is wide enough.

    Args:
        largest: the largest batch, in tokens.
        sizes: batches that are run at exactly this size, as captured graphs are: each with the
            count before it.
        ceilings: counts up to which something else is chosen. They end buckets, as powers of two
            and the largest batch do.

    Returns:
        Counts from 1 to `largest`, each once: those of the buckets, ascending, then those of
        `sizes`, which bring no further kind.
    """
    powers = (1 << bits for bits in range(largest.bit_length()))
    ends = sorted({largest, *powers, *(n for n in ceilings if 1 <= n <= largest)})
    found: set[int] = set()
    for below, end in pairwise((0, *ends)):
        found |= {n for n in _kinds(end) if n > below}
    around = {n for size in sizes for n in (size - 1, size) if 1 <= n <= largest}
    return [*sorted(found), *sorted(around - found)]


def _kinds(end: int) -> set[int]:
    """The last counts up to `end` that 16 divides, and that 8, 4, 2 and 1 divide and no more."""
    found = {end - end % ALIGNMENT}
    step = ALIGNMENT // 2
    while step:
        found.add(end - (end - step) % (2 * step))
        step //= 2
    return found
