"""At how many tokens a call launches other kernels: what is right on one side may be wrong on the
other. And at how many tokens calls compile every kernel that a served model needs (`warm_counts`).

Triton tells which compiled variant of a kernel it launches. Kernels of other compilers are told
apart by their names in a profile, which leaves the driver's tracing on: an engine must not have
that, and the kit's check of a start has it (`Request.launched`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

Launched = frozenset[tuple[str, int]]
"""What one call has launched: names, and of Triton's kernels the compiled variants."""

ALIGNMENT = 16
"""What Triton asks of an integer and of an address: whether this divides it."""


def edges(
    kernels: Callable[[int], Launched], smallest: int, largest: int, goes_on: Callable[[], bool]
) -> Iterator[int]:
    """The smallest numbers of tokens from which on other kernels are launched than for one less.

    Args:
        kernels: what a call of so many tokens launches.
        smallest, largest: the smallest and the largest batch, in tokens.
        goes_on: whether the search goes on, before each call of `kernels`.
    """
    known: dict[int, Launched] = {}

    def at(tokens: int) -> Launched:
        if tokens not in known:
            known[tokens] = kernels(tokens)
        return known[tokens]

    powers = (1 << n for n in range(largest.bit_length()))
    counts = sorted({*(n for n in powers if n > smallest), smallest, largest})
    for below, above in pairwise(counts):
        if not goes_on():
            return
        if at(below) == at(above):
            continue
        low, high = below, above
        while high - low > 1 and goes_on():
            middle = (low + high) // 2
            if at(middle) == at(low):
                low = middle
            else:
                high = middle
        yield high


def launched(call: Callable[[], object], device: torch.device) -> Launched:
    """What a call launches of Triton's kernels; on a CPU it launches nothing, and is not made.

    Args:
        call: the call.
        device: where it runs.
    """
    found: set[tuple[str, int]] = set()
    if device.type != "cpu":
        with _told_by_triton(found):
            call()
    return frozenset(found)


@contextmanager
def _told_by_triton(found: set[tuple[str, int]]) -> Iterator[None]:
    """Inside the block, what Triton launches is added to `found`."""
    knobs = sys.modules.get("triton.knobs")
    hooks: Any = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if not hasattr(hooks, "add"):  # nobody has loaded Triton, or it has no chain of hooks
        yield
        return

    def note(metadata: Any) -> None:
        told = metadata.get()
        found.add((str(told.get("name")), int(told.get("function") or 0)))

    hooks.add(note)
    try:
        yield
    finally:
        hooks.remove(note)


def warm_counts(largest: int, sizes: Iterable[int] = (), ceilings: Iterable[int] = ()) -> list[int]:
    """Token counts that between them bring every kind of number, in every bucket.

    A kernel that is compiled when it is called is compiled again for another kind of number among
    its arguments. Triton's kinds are 1, the multiples of 16, and all others; libraries around it
    choose between kernels by size, mostly at powers of two.

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
