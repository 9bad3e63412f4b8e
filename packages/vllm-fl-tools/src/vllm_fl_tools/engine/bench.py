"""How long calls take: on a device as the replay of a graph, elsewhere by the host's clock.

For `vllm-fl tune` alone, as `tuning.py`.
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

__all__ = ["Bench", "cold_bytes"]

LONGEST = 10e-3
"""Seconds after which a round on a CPU makes no further call: on a busy one a call that takes
microseconds may take milliseconds, many times over."""

WARM_UP = 3

LAUNCHES = 50
"""How many launches are timed, at least."""

Timed = tuple[Callable[..., Any], Sequence[tuple[Any, ...]], Callable[[], None]]
"""(a call, its arguments each time, what gives those that it overwrites back what they held)."""


class Bench:
    """Times calls on a device with cold caches, as the mode serves them.

    On a CPU, and in eager mode on a device, a call's time is from Python until the device is done,
    the host's work included. In compiled mode on CUDA the calls are captured in a graph, and their
    time is the device's when it is replayed.

    Args:
        device: where.
        mode: how the engine runs the model.
        clock: seconds.
    """

    def __init__(self, device: torch.device, mode: Mode, clock: Callable[[], float]) -> None:
        self.device, self.clock = device, clock
        self.captures = mode == "compiled" and device.type == "cuda"
        self.timers: dict[str, Timer] = {}
        self.parts: dict[str, list[list[float]]] = {}
        self.launches: dict[str, Callable[[], list[float]]] = {}
        if self.captures:
            gc.collect()  # an older graph that is freed during a capture spoils it
        self._wait = getattr(torch.get_device_module(device), "synchronize", lambda: None)
        self._flushed = torch.zeros(cold_bytes(device), dtype=torch.uint8, device=device)

    def seconds_of(self, call: Callable[..., Any], args: tuple[Any, ...]) -> float:
        """Roughly, after what it compiles and allocates at its first calls."""
        seconds = 0.0
        for _ in range(WARM_UP + 1):
            self._wait()
            start = self.clock()
            call(*args)
            self._wait()
            seconds = self.clock() - start
        return seconds

    def timer(self, forms: Sequence[Timed]) -> Callable[[], list[float]]:
        """The times of the forms of an op, each from one call with each of its arguments.

        On a CPU it is the median: another process may take the CPU away in the middle of one. A
        device that the calls are queued for gives their mean. No form has arguments of another, so
        that caches which are cold for the first one are cold for all.
        """
        parts = [(self._timed(call, sets), renew) for call, sets, renew in forms]

        def once() -> list[float]:
            for _, renew in parts:
                renew()
            self._cool()
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
        """How long the host takes to launch a call, the median of each form, µs.

        Nobody waits for the device meanwhile. What the calls overwrite is not renewed.
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

    def launch_of_pytorch(self) -> float:
        """The same of an operator of PyTorch's that has little to do."""
        one = torch.zeros(1, device=self.device)
        (median,) = self.launch([(one.add_, [(1,)])])
        return median

    def _cool(self) -> None:
        """Fill the caches with something else."""
        self._flushed.add_(1)
        self._wait()


def cold_bytes(device: torch.device) -> int:
    """The size of a buffer that displaces what a device's caches hold."""
    if device.type == "cuda":
        return 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        sizes = [int(path.read_text().strip().removesuffix("K")) * 1024 for path in caches]
    except (OSError, ValueError):
        sizes = []
    return max(sizes, default=32 * 2**20) * 5 // 4
