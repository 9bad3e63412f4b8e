"""How much a verification tries: numbers of calls, not seconds.

A call of many bytes is several calls, and is made fewer times for it. So the model, the seed and
the kind of device decide what is tried, and the speed of the machine does not. Only the `Valve` has
a clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm_fl.logs import get_logger

log = get_logger("engine")

ON_CPU, ELSEWHERE = 2**20, 2**26
"""Bytes of one call, on a CPU and on other devices, which are faster by about this factor."""

SECONDS = 600.0
"""How long one startup may verify before its valve closes. Usual startups take some seconds."""


def as_calls(nbytes: float, device: torch.device) -> float:
    """How many calls a call of this many bytes is: at least one."""
    return max(1.0, nbytes / (ON_CPU if device.type == "cpu" else ELSEWHERE))


class Valve:
    """Closes all budgets of a startup that has verified for too long.

    Args:
        seconds: how long it may verify.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._spent = 0.0
        self._since: float | None = None
        self._left_out: dict[str, None] = {}

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Count the seconds of the block. If the valve has closed, one warning at its end lists
        what was left out."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._spent, self._since = self._elapsed(), None
            if self._left_out:
                listed = ", ".join(self._left_out)
                limit = f"verification took longer than {self.seconds:.0f} s"
                log.warning("Part of the plan is not verified, since %s: %s", limit, listed)
                self._left_out.clear()

    def is_closed(self, what: str) -> bool:
        """Whether `what` must be left out, which is noted."""
        closed = self._elapsed() > self.seconds
        if closed:
            self._left_out[what] = None
        return closed

    def _elapsed(self) -> float:
        return self._spent + (0.0 if self._since is None else time.monotonic() - self._since)


class Budget:
    """A number of calls.

    Args:
        calls: how many may be made.
        valve: of the startup.
    """

    def __init__(self, calls: float, valve: Valve) -> None:
        self.left, self.valve = calls, valve

    def takes(self, what: str, calls: float = 1.0) -> bool:
        """Whether calls are left. If so, subtract this many, which may be more than are left.

        Args:
            what: what is left out otherwise, for the valve's warning.
            calls: how many calls it is, by its bytes.
        """
        if self.left <= 0 or self.valve.is_closed(what):
            return False
        self.left -= calls
        return True
