"""Times calls: by graph replay in compiled mode on CUDA, otherwise by the host's clock.

Only for `vllm-fl tune`, like `tuning.py`.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_fl.settings.policy import Mode

from .timing import Timer

LONGEST = 10e-3
"""Limit in seconds for the calls of a round on a CPU, because calls of microseconds can take
milliseconds each on a busy CPU.
"""

WARM_UP = 3

LAUNCHES = 50
"""Minimum number of timed launches."""

Timed = tuple[Callable[..., Any], Sequence[tuple[Any, ...]], Callable[[], None]]
"""(function, arguments of each call, function that restores arguments that calls overwrite)."""


class Bench:
    """Times calls with cold caches, in the way that the mode runs them. `clock` returns seconds.

    On a CPU, and in eager mode on a device, a call's time begins in Python, and ends when the
    device has finished. It includes the host's work. In compiled mode on CUDA the calls are
    captured in a graph, and their time is the device time of its replay.
    """

    def __init__(self, device: torch.device, mode: Mode, clock: Callable[[], float]) -> None:
        self.device, self.clock = device, clock
        self.captures = mode == "compiled" and device.type == "cuda"
        self.timers: dict[str, Timer] = {}
        self.parts: dict[str, list[list[float]]] = {}
        self.launches: dict[str, Callable[[], list[float]]] = {}
        if self.captures:
            gc.collect()  # freeing an older graph would break a capture
        self._wait = getattr(torch.get_device_module(device), "synchronize", lambda: None)
        self._flushed = torch.zeros(cold_bytes(device), dtype=torch.uint8, device=device)

    def seconds_of(self, call: Callable[..., Any], args: tuple[Any, ...]) -> float:
        """Return the approximate seconds of a call, after first calls that compile and allocate."""
        seconds = 0.0
        for _ in range(WARM_UP + 1):
            self._wait()
            start = self.clock()
            call(*args)
            self._wait()
            seconds = self.clock() - start
        return seconds

    def timer(self, forms: Sequence[Timed]) -> Callable[[], list[float]]:
        """Return a function that times the forms of an op once, in µs per call.

        Each form is called once with each of its arguments. On a CPU the result is the median,
        because another process may interrupt a call. On a device with a queue it is the mean. Forms
        share no arguments, so caches are cold for every form.
        """
        parts = [(self._timed(call, sets), renew) for call, sets, renew in forms]

        def once() -> list[float]:
            for _, renew in parts:
                renew()
            self._flushed.add_(1)  # fills the caches with other data
            self._wait()
            return [timed() for timed, _ in parts]

        return once

    def _timed(self, call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Timer:
        def run() -> None:
            for args in sets:
                call(*args)

        def mean() -> float:
            start = self.clock()
            run()
            self._wait()
            return (self.clock() - start) / len(sets) * 1e6

        def median() -> float:
            times: list[float] = []
            for args in sets:
                start = self.clock()
                call(*args)
                times.append(self.clock() - start)
                if sum(times) > LONGEST:
                    break
            return statistics.median(times) * 1e6

        if self.captures:
            return self._captured(run, len(sets))
        return median if self.device.type == "cpu" else mean

    def _captured(self, run: Callable[[], None], calls: int) -> Timer:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                run()
        finally:
            if collects:
                gc.enable()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replayed() -> float:
            start.record()
            graph.replay()
            end.record()
            self._wait()
            return float(start.elapsed_time(end)) / calls * 1e3

        return replayed

    def launch(
        self, forms: Sequence[tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]]
    ) -> list[float]:
        """Return the host's median time to launch a call of each form, µs.

        It does not wait for the device between calls, and does not restore overwritten arguments.
        """
        medians = []
        for call, sets in forms:
            times: list[float] = []
            self._wait()
            while len(times) < LAUNCHES:
                for args in sets:
                    start = self.clock()
                    call(*args)
                    times.append(self.clock() - start)
            self._wait()
            medians.append(statistics.median(times) * 1e6)
        return medians


def cold_bytes(device: torch.device) -> int:
    """Return the size of a buffer that displaces a device's caches."""
    if device.type == "cuda":
        return 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        sizes = [int(path.read_text().strip().removesuffix("K")) * 1024 for path in caches]
    except (OSError, ValueError):
        sizes = []
    return max(sizes, default=32 * 2**20) * 5 // 4
