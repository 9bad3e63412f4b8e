"""Limits of verification as numbers of calls instead of seconds.

A call with many bytes equals several calls. The set of verified calls therefore depends on the
model, the seed and the kind of device, but not on the machine's speed. Only `Valve` uses a clock.
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
"""Limit of one startup's verification. It usually takes a few seconds."""


def as_calls(nbytes: float, device: torch.device) -> float:
    """Return `nbytes` as a number of calls, at least 1."""
    return max(1.0, nbytes / (ON_CPU if device.type == "cpu" else ELSEWHERE))


class Valve:
    """Closes all budgets of a startup when its verification takes longer than `seconds`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._spent = 0.0
        self._since: float | None = None
        self._left_out: dict[str, None] = {}

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Count the seconds of the block. If the valve has closed, log what was omitted."""
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
        """Return whether `what` must be omitted. If so, store it for the warning."""
        if self.is_overdue:
            self._left_out[what] = None
        return self.is_overdue

    @property
    def is_overdue(self) -> bool:
        return self._elapsed() > self.seconds

    def _elapsed(self) -> float:
        return self._spent + (0.0 if self._since is None else time.monotonic() - self._since)


class Budget:
    """A number of available calls, limited by the valve of the startup."""

    def __init__(self, calls: float, valve: Valve) -> None:
        self.left, self.valve = calls, valve

    def takes(self, what: str, calls: float = 1.0) -> bool:
        """Subtract `calls` and return True if any calls are left, even fewer than `calls`.
        Otherwise return False. If the valve has closed, its warning includes `what`.
        """
        if self.left <= 0 or self.valve.is_closed(what):
            return False
        self.left -= calls
        return True
