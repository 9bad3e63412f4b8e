"""Running a plan's implementations before they serve: a wrong kernel is caught by name."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch

from .contracts import ModelSizes, OpSpec, Sample, contracts
from .logs import get_logger
from .verification import Comparison, compare

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .types import OpImpl

__all__ = ["find_faults"]

log = get_logger("engine")

SLOW = 10.0
"""Seconds after which the log names the implementation that is running. One that takes as long a
second time, when nothing is left to compile, is taken out: it would stall the engine."""


def find_faults(
    impls: Iterable[OpImpl],
    dtype: torch.dtype,
    device: torch.device,
    sizes: ModelSizes | None,
    *,
    compares: bool = True,
) -> dict[tuple[str, str], tuple[str, Exception | None]]:
    """Run each implementation on its contract's samples and on the model's own sizes.

    Args:
        impls: the implementations, one per op.
        dtype: the model's dtype.
        device: the worker's device.
        sizes: the model's sizes; None where its configuration does not tell them.
        compares: whether results are compared with the oracle; otherwise they must only run.

    Returns:
        (op, impl id) -> (why it must not serve, its exception or None).
    """
    faults = {}
    for impl in impls:
        fault = _fault(impl, contracts()[impl.op_name], dtype, device, sizes, compares)
        if fault is not None:
            faults[impl.op_name, impl.impl_id] = fault
    _release(device)
    return faults


def _fault(
    impl: OpImpl,
    spec: OpSpec,
    dtype: torch.dtype,
    device: torch.device,
    sizes: ModelSizes | None,
    compares: bool,
) -> tuple[str, Exception | None] | None:
    served = list(spec.served(sizes, dtype, device)) if sizes is not None else []
    refusals = []
    for sample in chain(spec.samples(dtype, device), served):
        with _watched(impl, sample.name) as first:
            result = compare(impl, spec, sample, dtype)
        if first.slow:
            with _watched(impl, sample.name) as second:
                compare(impl, spec, _again(spec, sample.name, sizes, dtype, device), dtype)
            if second.slow:
                return f"takes {second.seconds:.0f} s for one call ({sample.name})", None
        fault = _judged(result, compares)
        if fault is not None:
            return f"{fault} ({sample.name}, {result.dtype})", result.error
        if result.status == "refused" and sample in served:
            refusals.append(f"{sample.name}: {result.reason}")
    if served and len(refusals) == len(served):
        return f"it refuses the served model's own sizes ({refusals[0]})", None
    return None


def _judged(result: Comparison, compares: bool) -> str | None:
    if result.status == "raised":
        return f"it raised {result.reason}"
    if result.status == "wrong" and compares:
        return f"it is wrong: {result.reason}"
    return None


def _again(
    spec: OpSpec,
    name: str,
    sizes: ModelSizes | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Sample:
    """The same sample made anew: the first one's tensors are used up."""
    samples = chain(spec.samples(dtype, device), spec.served(sizes, dtype, device) if sizes else ())
    return next(sample for sample in samples if sample.name == name)


class _Watch:
    seconds = 0.0

    @property
    def slow(self) -> bool:
        return self.seconds > SLOW


@contextmanager
def _watched(impl: OpImpl, sample: str) -> Iterator[_Watch]:
    """Name the implementation in the log while it runs for longer than SLOW seconds."""
    watch = _Watch()
    line = "Implementation '%s' of op '%s' has been running for %.0f s on one call (%s)"
    alarm = threading.Timer(SLOW, log.warning, (line, impl.impl_id, impl.op_name, SLOW, sample))
    alarm.daemon = True
    start = time.monotonic()
    alarm.start()
    try:
        yield watch
    finally:
        alarm.cancel()
        watch.seconds = time.monotonic() - start


def _release(device: torch.device) -> None:
    """Leave nothing allocated: vLLM sizes its KV cache by what is free afterwards."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
