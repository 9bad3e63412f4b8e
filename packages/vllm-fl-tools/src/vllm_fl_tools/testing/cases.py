"""The list of checks, the cases that they make of an implementation, and running them."""

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
from .subject import HIDDEN, SIZES, Refused, Subject

__all__ = ["CHECKS", "Case", "Check", "Failure", "cases_of", "failures"]

__tracebackhide__ = HIDDEN


@dataclass(frozen=True)
class Check:
    """One property that every implementation must have.

    Args:
        function: raises AssertionError where an implementation lacks it.
        each: what it is run on: each sample, each bad input, each family of models, each dtype, or
            once for the op.
    """

    function: Callable[[Subject, str, str], None]
    each: Literal["sample", "bad input", "family", "dtype", "op"]

    def run(self, subject: Subject, dtype: str, sample: str) -> None:
        """Run it, and set the state of the process as it was.

        What one check's calls leave changed, the next one would take for the state to compare with.
        """
        before = process_state.state_of(subject.device)
        try:
            self.function(subject, dtype, sample)
        finally:
            process_state.restore(before, subject.device)


CHECKS: dict[str, Check] = {
    "availability": Check(checks.availability, "op"),
    "declaration": Check(checks.declaration, "op"),
    "serving": Check(checks.serving, "dtype"),
    "values": Check(checks.values, "sample"),
    "bad_inputs": Check(checks.bad_inputs, "bad input"),
    "large_pools": Check(checks.large_pools, "op"),
    "refusals": Check(checks.refusals, "dtype"),
    "call_op": Check(checks.call_op, "dtype"),
    "determinism": Check(checks.determinism, "dtype"),
    "preflight": Check(checks.preflight, "dtype"),
    "families": Check(checks.families, "family"),
    "opcheck": Check(compiling.opcheck, "dtype"),
    "tracing": Check(compiling.tracing, "dtype"),
    "fork": Check(processes.fork, "dtype"),
    "spawn": Check(processes.spawn, "dtype"),
    "engine": Check(engine.engine, "op"),
}
"""Every check by name, the quick ones first."""


@dataclass(frozen=True)
class Case:
    """One test: a check on an op, in a dtype and with a sample where the check has them."""

    op: str
    check: str
    dtype: str = ""
    sample: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.op, self.dtype, self.sample)))


@dataclass(frozen=True)
class Failure:
    """A case that did not pass, and why."""

    case: Case
    reason: str


def cases_of(subject: Subject) -> Iterator[Case]:
    """The tests of an implementation; where it is not available, the one that says so."""
    op = subject.impl.op_name
    available = subject.impl.availability() is True
    for name, check in CHECKS.items() if available else [("availability", CHECKS["availability"])]:
        if check.each == "op":
            yield Case(op, name)
            continue
        if check.each == "family":
            if subject.sizes != SIZES:  # its test has named the model to try
                continue
            dtype = served_dtype(subject.spec)
            yield from (Case(op, name, dtype, family) for family in families_of(subject.spec))
            continue
        for dtype in subject.dtypes:
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
    """Run the checks on one implementation, installed or not, and give what does not pass.

    Lazy: `next(failures(impl), None)` stops at the first. What the implementation refuses passes.

    Args:
        impl: the implementation of a contract's op.
        device: where it runs.
        without: the checks to leave out; `spawn` and `engine` need an installed backend.
        deadline: seconds that a child process may take.
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
