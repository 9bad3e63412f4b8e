"""Run verification at startup and the kit on wrong kernels, in the current process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

import graph_on_cpu
import torch
import torch._dynamo  # before children are forked

from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl_tools.testing import CHECKS, failures
from vllm_fl_verify import graphs, preflight, run, trials
from vllm_fl_verify.checks import STARTUP_CHECKS as CHECKS_AT_START
from vllm_fl_verify.trials import Request, Role

from . import exceptions, right
from .corpus import WITHOUT_ENGINES, Wrong, kernels

__all__ = ["Verdict", "graph_verdict", "kit_verdict", "right_kit_verdict", "start_verdicts"]

SEED = 20240229
"""Seed of the random choices of startup, so that verdicts are reproducible."""

GRAPH = 64
"""Tokens of the captured graph."""

assert known_contracts().contracts and kernels()  # before children are forked


class Verdict(NamedTuple):
    """Verdict on a kernel.

    Args:
        outcome: `named`: it was disabled, or a check failed; `passes`; `ends`: an exception that
            does not name the kernel; `dies`: the process ended; `hangs`. For the answers of an
            engine: `right` or `wrong`.
        reason: message of the check.
        check: the failed check of the kit, or empty.
    """

    outcome: Literal["named", "passes", "ends", "dies", "hangs", "right", "wrong"]
    reason: str = ""
    check: str = ""


def _faults_at_start(impls: Sequence[OpImpl], like: Wrong, captured: int = 0) -> dict[str, str]:
    """Run the verification of a worker at startup: impl id -> why it is disabled."""
    compiles = like.mode == "compiled"
    roles = [
        Role(impl, compiled=impl.fn if compiles and impl.traceable else None, captured=captured)
        for impl in impls
    ]
    dtype, device = getattr(torch, like.dtype), torch.device("cpu")
    findings = preflight.find_faults(
        Request(roles, dtype, device, like.sizes, backend=like.backend, seed=SEED)
    )
    return {impl_id: found.reason for (_, impl_id), found in findings.objections.items()}


def _prepare(wrong: Wrong) -> None:
    torch.set_num_threads(1)
    # Try all further token counts, or none.
    trials.CALLS = 1e9 if wrong.kind in ("sizes", *WITHOUT_ENGINES) else 0.0
    if wrong.kind == "compiled":  # one startup verifies many kernels here
        run.LOWERED = 10**6


def start_verdicts(names: Sequence[str], without: Sequence[str] = ()) -> dict[str, Verdict]:
    """Run verification at startup on these kernels, and on a correct one, named `right`.

    Args:
        names: the kernels.
        without: checks to skip.
    """
    preflight.STARTUP_CHECKS = tuple(c for c in CHECKS_AT_START if c.__name__ not in without)
    members = [kernels()[name] for name in names]
    _prepare(members[0])
    os.environ.update(members[0].environ)
    if members[0].impatient:
        breadcrumb.SLOW, exceptions.SECONDS[0] = 1.0, 1.5
    impls = {wrong.name: wrong.impl() for wrong in members}
    impls["right"] = _right(members[0])
    faults = _faults_at_start(list(impls.values()), members[0])
    return {
        name: Verdict("named", faults[impl.impl_id])
        if impl.impl_id in faults
        else Verdict("passes")
        for name, impl in impls.items()
    }


def _right(like: Wrong) -> OpImpl:
    """Return the correct implementation of the op."""
    return dataclasses.replace(
        like.impl(),
        impl_id="vendor.right",
        vendor="right",
        fn=right.of(like.op),
        supports=None,
        consumes=frozenset(),
    )


def graph_verdict(names: Sequence[str], checks: Sequence[str] = ()) -> dict[str, Verdict]:
    """Run verification at startup with a captured graph; only faults in the graph count."""
    (name,) = names
    wrong = kernels()[name]
    _prepare(wrong)
    graphs.captured = graph_on_cpu.captured
    reason = _faults_at_start([wrong.impl()], wrong, GRAPH).get(f"vendor.{name}", "")
    return {name: Verdict("named" if "in a graph" in reason else "passes", reason)}


def kit_verdict(names: Sequence[str], checks: Sequence[str]) -> dict[str, Verdict]:
    """Run these checks of the conformance kit, or all, on one kernel."""
    (name,) = names
    return {name: _by_kit(kernels()[name], kernels()[name].impl(), checks)}


def right_kit_verdict(names: Sequence[str], checks: Sequence[str]) -> dict[str, Verdict]:
    """Run these checks of the kit on the correct kernel of the op of this one."""
    (name,) = names
    return {name: _by_kit(kernels()[name], _right(kernels()[name]), checks)}


def _by_kit(wrong: Wrong, impl: OpImpl, checks: Sequence[str]) -> Verdict:
    _prepare(wrong)
    left_out = {"spawn", "engine"} | (CHECKS.keys() - set(checks) if checks else set())
    failure = next(failures(impl, without=left_out, deadline=10.0), None)
    if failure is None:
        return Verdict("passes")
    return Verdict("named", failure.reason, failure.case.check)
