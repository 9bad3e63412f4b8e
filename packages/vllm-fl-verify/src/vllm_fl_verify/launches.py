"""Token counts that make a call launch different kernels. Only some of these may be incorrect.

Triton reports the compiled variant of each launched kernel. Kernels of other compilers can only be
distinguished by name in a profile, which leaves the driver's tracing enabled. The kit's check of a
startup uses such profiles, but an engine must not (`Request.launched`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import torch

Launched = frozenset[tuple[str, int]]
"""Kernels of one call: names, and Triton's compiled variants."""


def launch_edges(
    kernels: Callable[[int], Launched], smallest: int, largest: int, goes_on: Callable[[], bool]
) -> Iterator[int]:
    """Yield the token counts at which a call launches different kernels than with one token less.

    Args:
        kernels: token count -> kernels that a call launches.
        goes_on: returns whether to continue. Called before each call of `kernels`.
    """
    at = cache(kernels)
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
    """Make a call and return the Triton kernels that it launches. On a CPU, no call is made."""
    found: set[tuple[str, int]] = set()
    if device.type != "cpu":
        with _record_triton(found):
            call()
    return frozenset(found)


@contextmanager
def _record_triton(found: set[tuple[str, int]]) -> Iterator[None]:
    knobs = sys.modules.get("triton.knobs")
    hooks: Any = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if not hasattr(hooks, "add"):  # Triton is not loaded, or has no chain of hooks
        yield
        return

    def note(metadata: Any) -> None:
        facts = metadata.get()
        found.add((str(facts.get("name")), int(facts.get("function") or 0)))

    hooks.add(note)
    try:
        yield
    finally:
        hooks.remove(note)
