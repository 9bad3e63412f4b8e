"""The checks, and the test cases that they make for an implementation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from vllm_fl.plugins.types import OpImpl
from vllm_fl.text import quote
from vllm_fl_verify import process_state

from . import checks, compiling, engine, processes
from .families import families_of, served_dtype
from .subject import HIDE_FRAMES, SIZES, Refused, Subject

__tracebackhide__ = HIDE_FRAMES


@dataclass(frozen=True)
class ConformanceCheck:
    """A property that every implementation must have.

    Args:
        function: raises AssertionError if the implementation does not have the property.
        each: whether to run it once per sample, bad input, family of models, dtype or op.
    """

    function: Callable[[Subject, str, str], None]
    each: Literal["sample", "bad input", "family", "dtype", "op"]

    def run(self, subject: Subject, dtype: str, sample: str) -> None:
        """Run the check, and restore the state of the process for the next check."""
        before = process_state.state_of(subject.device)
        try:
            self.function(subject, dtype, sample)
        finally:
            process_state.restore(before, subject.device)


CHECKS: dict[str, ConformanceCheck] = {
    "availability": ConformanceCheck(checks.availability, "op"),
    "declaration": ConformanceCheck(checks.declaration, "op"),
    "serving": ConformanceCheck(checks.serving, "dtype"),
    "values": ConformanceCheck(checks.values, "sample"),
    "bad_inputs": ConformanceCheck(checks.bad_inputs, "bad input"),
    "large_pools": ConformanceCheck(checks.large_pools, "op"),
    "refusals": ConformanceCheck(checks.refusals, "dtype"),
    "call_op": ConformanceCheck(checks.unchanged_arguments, "dtype"),
    "determinism": ConformanceCheck(checks.determinism, "dtype"),
    "preflight": ConformanceCheck(checks.preflight, "dtype"),
    "families": ConformanceCheck(checks.families, "family"),
    "opcheck": ConformanceCheck(compiling.opcheck, "dtype"),
    "tracing": ConformanceCheck(compiling.tracing, "dtype"),
    "fork": ConformanceCheck(processes.fork, "dtype"),
    "spawn": ConformanceCheck(processes.spawn, "dtype"),
    "engine": ConformanceCheck(engine.engine, "op"),
}
"""Name -> check; the fastest checks are first."""


@dataclass(frozen=True)
class Case:
    """One test: a check of an op, with a dtype and a sample if the check uses them."""

    op: str
    check: str
    dtype: str = ""
    sample: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.op, self.dtype, self.sample)))


@dataclass(frozen=True)
class Failure:
    """A case that did not pass, and the reason."""

    case: Case
    reason: str


def cases_of(subject: Subject) -> Iterator[Case]:
    """Yield the cases of an implementation; only `availability` if it is not available."""
    op = subject.impl.op_name
    available = subject.impl.availability() is True
    for name, check in CHECKS.items() if available else [("availability", CHECKS["availability"])]:
        if check.each == "op":
            yield Case(op, name)
            continue
        if check.each == "family":
            if subject.sizes != SIZES:  # the test sets its own model
                continue
            dtype = served_dtype(subject.spec)
            yield from (Case(op, name, dtype, family) for family in families_of(subject.spec))
            continue
        for dtype in subject.spec.dtypes:
            if check.each == "dtype":
                yield Case(op, name, dtype)
            elif check.each == "sample":
                yield from (Case(op, name, dtype, s.name) for s in subject.all_samples(dtype))
            else:
                yield from (Case(op, name, dtype, b.name) for b in subject.bad_inputs(dtype))


def failures(
    impl: OpImpl,
    device: str | torch.device = "cpu",
    *,
    without: Collection[str] = ("spawn", "engine"),
    deadline: float = 120.0,
) -> Iterator[Failure]:
    """Run the checks on one implementation, installed or not, and yield the failures.

    It is lazy: `next(failures(impl), None)` stops at the first failure. Unsupported calls pass.

    Args:
        impl: an implementation of an op with a contract.
        device: to run on.
        without: checks to omit; `spawn` and `engine` need an installed backend.
        deadline: time limit of a child process, in seconds.
    """
    subject = Subject(impl, torch.device(device), deadline=deadline)
    for case in cases_of(subject):
        if case.check in without:
            continue
        try:
            CHECKS[case.check].run(subject, case.dtype, case.sample)
        except Refused:
            pass
        except (Exception, SystemExit) as error:
            yield Failure(case, str(error) if isinstance(error, AssertionError) else quote(error))
