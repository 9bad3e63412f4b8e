"""Runs a plan's implementations at startup to find incorrect kernels.

Every candidate is called on the contract's samples and on the served model's sizes. The calls are
made in inference mode and on guarded memory, with many token counts, twice on the same buffers, and
also with values as large as the largest activations. In compiled mode, the first choice is also
called in the compiler's form.

Implementations that will run are then called at further token counts, to compile all their kernels.
If vLLM captures graphs, they are also captured in a graph, which is replayed with different values.

If an earlier startup with the same key has verified an implementation, only one call of each form
is compared, with a size that is drawn, and its kernels are compiled as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from vllm_fl.engine.phases import Phases
from vllm_fl.logs import get_logger
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.inspection import FAILED, REJECTED, Key, Objection

from . import process_state
from .checks import KEPT_CHECKS, STARTUP_CHECKS
from .determinism import variance
from .run import Run, SharedState
from .trials import Request, Role, Trials
from .verification import dtype_name

log = get_logger("engine")

HOST_THREADS = 8
"""Maximum threads of the host for computing the oracle. With the 64 threads of a large host, small
sums take several times as long."""


@dataclass
class Findings:
    """Result of a verification.

    Args:
        objections: (op, impl id) -> why it must not run.
        remarks: what was not verified, one phrase each, for the report.
        smaller: op -> calls that were verified at smaller sizes than in the model. Ops without such
            calls are omitted.
    """

    objections: dict[Key, Objection] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    smaller: dict[str, list[str]] = field(default_factory=dict)


def find_faults(request: Request) -> Findings:
    log.debug("verifying with seed %d", request.seed)
    found = Findings()
    with (
        request.valve.verifying(),
        host_threads(request.device),
        breadcrumb.Watchdog(log) as watch,
        request.trials() as trials,
    ):
        startup = SharedState(request, watch)
        for role in request.roles:
            objection = _look(startup, role, trials[role.calls])
            if objection is not None:
                found.objections[role.key] = objection
        phrases = defaultdict[str, list[str]](list)
        for (op, *_), some in trials.items():
            for each in some:
                phrases[op] += (call.smaller for call in each.calls)
    found.smaller = {op: [*dict.fromkeys(filter(None, n))] for op, n in phrases.items() if any(n)}
    unknown = [op for op, of_calls in phrases.items() if request.sizes and not of_calls]
    if found.smaller:
        found.remarks.append(f"verified at smaller sizes than served: {', '.join(found.smaller)}")
    if unknown:
        found.remarks.append(f"not verified at the model's sizes: {', '.join(unknown)}")
    for phrase, names in startup.left_out.items():
        further = f" and {len(names) - 3} more" if len(names) > 3 else ""
        found.remarks.append(f"{phrase}: {', '.join(sorted(names)[:3])}{further}")
    return found


@contextmanager
def host_threads(device: torch.device) -> Iterator[None]:
    """Limit the host's threads inside the block, if the device is not the CPU. On the CPU the
    number must be as when serving, and vLLM's CPU worker warns of each change."""
    before = torch.get_num_threads()
    if device.type == "cpu" or before <= HOST_THREADS:
        yield
        return
    torch.set_num_threads(HOST_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _look(startup: SharedState, role: Role, trials: Sequence[Trials]) -> Objection | None:
    """Run one implementation in each dtype of its op. Return why it must not run, or None."""
    request = startup.request
    if not trials:
        known, dtype = request.specs[role.impl.op_name].dtypes, dtype_name(request.dtype)
        return Objection(FAILED, f"the contract of its op supports {', '.join(known)}, not {dtype}")
    refusals = []
    for each in trials:
        run = Run(startup, role, each, len(trials))
        with role.running("the verification"):
            objection = _check(run)
        if objection is not None and request.keeper is not None and run.latest is not None:
            refused, why = objection.code != FAILED, objection.reason
            kept = request.keeper.keep(run.spec, role.impl, why, run.latest, refused=refused)
            objection = replace(objection, reason=why + kept)
        if objection is not None and objection.code == FAILED:
            return objection
        if objection is not None:
            refusals.append(objection)
    if len(refusals) == len(trials):
        return refusals[0]
    if request.requires and (why := variance(request, role, trials)):
        reason = f"{request.requires} is set, and it is {why}"
        return Objection(REJECTED, reason, ends_strict=False)
    return None


def _check(run: Run) -> Objection | None:
    seconds = Phases()
    try:
        with torch.inference_mode():
            for check in KEPT_CHECKS if run.role.kept else STARTUP_CHECKS:
                with seconds.during(check.__name__.strip("_").replace("_", " ")):
                    if (objection := next(check(run), None)) is not None:
                        return objection
        return None
    except Exception:  # an implementation may have changed state that verification needs
        if (problem := run.changed()) is None:
            raise
        return Objection(FAILED, problem)
    finally:
        took = ", ".join(f"{what} {n:.1f} s" for what, n in seconds.seconds.items() if n >= 0.1)
        log.debug("%s=%s: %s", *run.role.key, took or "no time")
        process_state.restore(run.before, run.trials.device)
        if others := run.before.others:
            run.startup.left_out["not monitored, since other threads change it"] |= others
