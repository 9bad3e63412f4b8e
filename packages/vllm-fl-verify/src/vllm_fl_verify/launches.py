"""At how many tokens a call launches other kernels: what is right on one side may be wrong on the
other.

Triton tells which compiled variant of a kernel it launches. Kernels of other compilers are told
apart by their names in a profile, which leaves the driver's tracing on: an engine must not have
that, and the kit's check of a start has it (`Request.launched`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

Launched = frozenset[tuple[str, int]]
"""What one call has launched: names, and of Triton's kernels the compiled variants."""


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
