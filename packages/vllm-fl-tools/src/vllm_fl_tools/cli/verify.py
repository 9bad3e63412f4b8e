"""`vllm-fl verify`: compare every implementation with the exact result, on this device.

The policy is ignored, because an implementation that is disabled today may be needed tomorrow.

Example: vllm-fl verify --op rms_norm --dtype bfloat16
"""

from __future__ import annotations

import argparse
import math
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.integration.targets import all_bindings
from vllm_fl.plugins.types import Impl, OpImpl
from vllm_fl.text import quote
from vllm_fl_ops.contracts.rules import typical_sizes

from ..operate.identity import cpu_name, device_name
from . import _stock
from ._engine import takes_model
from ._environment import distributions
from ._options import check_known, device_of, takes_timeout
from ._show import UsageError, print_answer, print_table, say
from ._watch import INTERRUPTED, TookTooLong, Watch

if TYPE_CHECKING:
    import torch

    from vllm_fl_verify.trials import Trials
    from vllm_fl_verify.verification import Comparison

    from ._replay import Replay

BATCH = 300
"""The largest batch for comparing the bits of rows, larger than the pool of verification."""

TIMEOUT = 120.0
"""Time limit of one sample in seconds, enough to compile or build a kernel at its first call."""

GIVEN_UP = 2
"""Number of timeouts after which the other samples of an implementation are skipped."""

STATES = {"ok": "ok", "refused": "unsupported", "wrong": "incorrect", "raised": "raised"}
"""Status of a sample -> the printed word."""

NUMBERS = re.compile(r"\((?:\d+,? ?)*\)|-?\d[\d.e+-]*|\b(?:inf|nan)\b")
"""The numbers and indices of a reason, which differ between samples with the same fault."""

HEADINGS = ("op", "implementation", "dtype", "samples", "worst", "same bits")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    takes_model(parser, "the model's folder, for --stock")
    parser.add_argument(
        "--stock",
        action="store_true",
        help="compare vLLM's own layers in an engine of --model, without vllm-fl",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="with --stock: all captured sizes, and the weights after they are loaded again",
    )
    parser.add_argument("--device", help="torch's device name; default: cuda or npu, else cpu")
    parser.add_argument("--dtype", action="append", metavar="DTYPE", help="may be repeated")
    parser.add_argument("--op", action="append", metavar="OP", help="may be repeated")
    parser.add_argument("--impl", action="append", metavar="ID", help="may be repeated")
    parser.add_argument(
        "--emulated",
        metavar="WHAT",
        help="record in the output that WHAT emulates the hardware",
    )
    takes_timeout(parser, "sample", TIMEOUT)
    text = "repeat a call that VLLM_FL_KEEP_FAULTS has kept, on each implementation or on --impl"
    parser.add_argument("--replay", metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a result is incorrect, a call raised or timed out, or no call was supported."""
    if arguments.stock:
        return _stock.run(arguments)
    if arguments.more or arguments.model or arguments.thorough:
        words = " ".join(arguments.more) or "--model and --thorough"
        raise UsageError(f"unrecognized arguments: {words} (they need --stock)")
    manager = get_default_manager()
    manager.ensure_initialized(defer_errors=True)  # the policy does not matter
    kernels = {name for each in manager.registry.plugins for name in each.owner.kernels}
    specs = manager.registry.snapshot().contracts
    every = {dtype for spec in specs.values() for dtype in spec.dtypes}
    check_known("dtype", arguments.dtype, every)
    device, replay = device_of(arguments.device), None
    if arguments.replay is not None:
        from ._replay import Replay

        replay = Replay(Path(arguments.replay), specs, device)
        arguments.op, arguments.dtype = [replay.facts["op"]], [replay.dtype]
    runnable, not_run = _choose(manager, arguments.op, arguments.impl)
    # Read the name first, because a kernel may break the device.
    name = cpu_name() if device.type == "cpu" else device_name(device)
    work = _Work(manager, runnable, arguments.dtype, device, replay)
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "distributions": distributions(kernels),
            "device": {"type": device.type, "name": name},
            "emulated": arguments.emulated,
        },
        "complete": True,
        **({"kept": replay.facts} if replay else {}),
        "results": work.results,
        "not_run": not_run,
    }

    def end(why: str) -> None:
        """Print the incomplete results."""
        found["complete"] = False
        print_answer(found, show, as_json=arguments.json)
        say(f"vllm-fl: {why}: {len(work.results)} of {len(work.units)} done", error=True)

    def stuck() -> None:
        end(f"{watch.running} hangs and cannot be interrupted")

    watch = Watch(len(work.units), arguments.timeout, stuck)
    try:
        with redirect_stdout(sys.stderr):  # output of a kernel is not a result
            work.run(watch)
    except KeyboardInterrupt:
        end("interrupted")
        return INTERRUPTED
    print_answer(found, show, as_json=arguments.json)
    bad = any(r["samples"]["wrong"] or r["samples"]["raised"] for r in work.results)
    bad = bad or any(_failed(r["determinism"]) for r in work.results)
    return 1 if bad or not any(r["samples"]["ok"] for r in work.results) else 0


def _failed(found: Mapping[str, Any] | None) -> bool:
    """Whether a call raised or timed out when its bits were compared."""
    from vllm_fl_verify.determinism import FIXED_BATCH, UNKNOWN, UNSUPPORTED

    sound = FIXED_BATCH, UNKNOWN, UNSUPPORTED
    return bool(found and found["runs"] is None and found["reason"] not in sound)


def _choose(
    manager: OpManager, ops: Sequence[str] | None, impls: Sequence[str] | None
) -> tuple[list[OpImpl], list[dict[str, Any]]]:
    """Return the implementations to run, and the others with the reason for not running each."""
    snapshot = manager.registry.snapshot()
    installed = [impl for found in snapshot.impls_by_op.values() for impl in found]
    check_known("op", ops, {*snapshot.ops})
    check_known("impl", impls, {impl.impl_id for impl in installed})
    runnable, not_run = [], []
    for impl in installed:
        if (ops and impl.op_name not in ops) or (impls and impl.impl_id not in impls):
            continue
        verdict = impl.availability()
        if not isinstance(impl, OpImpl):
            reason = "it is a class for vLLM, not a function"
        elif impl.op_name not in snapshot.contracts:
            reason = "its op has no contract"
        elif verdict is not True:
            reason = f"not available: {verdict}"
        else:
            runnable.append(impl)
            continue
        not_run.append({**_identity(manager, impl), "reason": reason})
    return runnable, not_run


def _identity(manager: OpManager, impl: Impl) -> dict[str, Any]:
    owner = manager.registry.snapshot().owners[impl.op_name, impl.impl_id]
    return {
        "op": impl.op_name,
        "impl_id": impl.impl_id,
        "kind": impl.kind.value,
        "vendor": impl.vendor,
        "distribution": owner.distribution,
        "version": owner.version,
    }


class _Work:
    """The units of a run, each an implementation in a dtype, and the results of finished units.

    `dtypes` is None for every dtype of a contract. With `replay`, only the kept call is repeated.
    """

    def __init__(
        self,
        manager: OpManager,
        impls: Sequence[OpImpl],
        dtypes: Sequence[str] | None,
        device: torch.device,
        replay: Replay | None = None,
    ) -> None:
        self.manager, self.device, self.replay = manager, device, replay
        snapshot = manager.registry.snapshot()
        self.specs = snapshot.contracts
        bindings = all_bindings(snapshot).values()
        every = typical_sizes(bindings)
        few = {r.name: r.few for binding in bindings for r in binding.sizes if r.few is not None}
        more = {name: few.get(name, value) for name, value in every.more.items()}
        own: dict[str, Any] = {name: few[name] for name in few if name not in more}
        self.sizes = replace(every, **own, more=more, tokens=(1, BATCH))
        self.units = [
            (impl, dtype)
            for impl in impls
            for dtype in self.specs[impl.op_name].dtypes
            if not dtypes or dtype in dtypes
        ]
        self.results: list[dict[str, Any]] = []
        self._given_up: Counter[tuple[str, str]] = Counter()

    def run(self, watch: Watch) -> None:
        import torch

        from vllm_fl_verify.trials import Trials

        for number, (impl, dtype) in enumerate(self.units, 1):
            spec = self.specs[impl.op_name]
            unit = f"{impl.op_name} {impl.impl_id} {dtype}"
            watch.begin(unit, number)
            # If a kernel ends the process, the last line identifies it.
            say(f"[{number}/{len(self.units)}] {unit}", error=True)
            start = time.perf_counter()
            trials = Trials(spec, getattr(torch, dtype), self.device, self.sizes, seed=0)
            comparisons = list(self._compare_all(impl, dtype, trials, watch))
            seconds = time.perf_counter() - start
            sound = all(c.status in ("ok", "refused") for c in comparisons)
            same = self._same_bits(impl, trials, watch) if sound and not self.replay else None
            self.results.append(
                {
                    **_identity(self.manager, impl),
                    "dtype": dtype,
                    **_summary(comparisons),
                    "determinism": same,
                    "seconds": round(seconds, 3),
                }
            )

    def _same_bits(self, impl: OpImpl, trials: Trials, watch: Watch) -> dict[str, Any]:
        """Return whether results are bitwise equal in other runs and batches, as JSON data."""
        from vllm_fl_verify.determinism import Determinism, determinism_of

        try:
            with watch.call("repeating"):
                found = determinism_of(impl, trials)
        except TookTooLong:
            found = Determinism(None, None, f"timed out after {watch.limit:g} s")
        return asdict(found)

    def _compare_all(
        self, impl: OpImpl, dtype_name: str, trials: Trials, watch: Watch
    ) -> Iterator[Comparison]:
        """Yield the comparison of every sample. An error only affects the result of its sample."""
        import torch

        from vllm_fl_verify.verification import Comparison, bias_problem, compare, tried

        spec = self.specs[impl.op_name]
        dtype = getattr(torch, dtype_name)
        key = (impl.op_name, impl.impl_id)

        def raised(sample: str, reason: str, error: Exception | None = None) -> Comparison:
            return Comparison(*key, sample, dtype_name, "raised", reason=reason, error=error)

        samples = tried(spec, dtype, self.device)
        how: Callable[..., Comparison] = compare
        if self.replay is not None:
            samples, how = iter((self.replay.sample,)), self.replay.compare
        compared = []
        while True:
            if self._given_up[key] >= GIVEN_UP:
                yield raised("(the rest)", f"not run: {GIVEN_UP} samples timed out")
                return
            try:
                sample = next(samples)
            except StopIteration:
                break
            except Exception as error:  # after a device error nothing can be allocated
                yield raised("(making the samples)", quote(error), error)
                return
            try:
                with watch.call(sample.name):
                    comparison = how(impl, spec, sample, dtype)
            except TookTooLong:
                self._given_up[key] += 1
                comparison = raised(
                    sample.name, f"timed out after {watch.limit:g} s (--timeout changes the limit)"
                )
            except Exception as error:
                comparison = raised(sample.name, quote(error), error)
            compared.append(comparison)
            yield comparison
        if problem := bias_problem(compared):
            share = max(each.share for each in compared if each.status == "ok")
            yield Comparison(*key, "(all samples)", dtype_name, "wrong", share, problem)
        try:
            _ = trials.forms
        except Exception as error:  # from the contract; `_same_bits` needs the forms
            yield raised("(making the calls of a served model)", quote(error), error)


def _summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the count of each status, the largest error, and each sample that is not ok."""
    shares = [
        (math.inf if math.isnan(c.share) else c.share, c.sample)
        for c in comparisons
        if c.status == "wrong" or not math.isnan(c.share)
    ]
    worst, where = max(shares, default=(None, None))
    return {
        "samples": {state: sum(c.status == state for c in comparisons) for state in STATES},
        "worst": _finite(worst),
        "worst_sample": where,
        "findings": [
            {"sample": c.sample, "status": c.status, "share": _finite(c.share), "reason": c.reason}
            for c in comparisons
            if c.reason
        ],
    }


def _finite(share: float | None) -> float | None:
    """Return an error for JSON; None if it is infinite (the finding's reason then mentions it)."""
    return round(share, 4) if share is not None and math.isfinite(share) else None


def _rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            r["op"],
            r["impl_id"],
            r["dtype"],
            ", ".join(f"{n} {STATES[state]}" for state, n in r["samples"].items() if n) or "none",
            "-" if r["worst"] is None else f"{r['worst']:.3g}",
            _same(r["determinism"]),
        )
        for r in results
    ]


def _same(found: dict[str, Any] | None) -> str:
    """Return the kinds of calls that have equal bits: runs, or runs and batches."""
    if found is None or (found["runs"] is None and found["batches"] is None):
        return "-"
    if not found["runs"]:
        return "no"
    return "runs, batches" if found["batches"] else "runs"


def _details(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each fault of each implementation in a dtype, then for unsupported calls."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in results:
        for finding in r["findings"]:
            state, reason = finding["status"], NUMBERS.sub("#", finding["reason"])
            kind = (state, r["op"], r["impl_id"], reason, r["dtype"] if state != "refused" else "")
            kinds.setdefault(kind, []).append({**finding, "dtype": r["dtype"]})
    for (state, op, impl, *_), (first, *more) in sorted(
        kinds.items(), key=lambda kind: kind[0][0] == "refused"
    ):
        line = (
            f"{op} {impl}: {STATES[state]}: {first['reason']} ({first['dtype']}, {first['sample']})"
        )
        yield line + _others(state, more)
    for r in results:
        found = r["determinism"]
        if found and found["batches"] is not True:
            what = "different bits" if found["batches"] is False else "bits not compared by batch"
            yield f"{r['op']} {r['impl_id']}: {what}: {found['reason']} ({r['dtype']})"


def _others(state: str, more: Sequence[Mapping[str, Any]]) -> str:
    """Return the end of a line for further samples with the same fault. --json has all of them."""
    if not more:
        return ""
    said = f", and {len(more)} more sample{'s' * (len(more) > 1)}"
    if state != "wrong":
        return said
    share, sample = max(
        ((math.inf if f["share"] is None else f["share"]), f["sample"]) for f in more
    )
    return f"{said}, the worst by {share:.3g} times the tolerance ({sample})"


def _not_run(found: Mapping[str, Any]) -> Iterator[str]:
    for entry in found["not_run"]:
        yield f"{entry['op']} {entry['impl_id']}: {entry['reason']}"
    if not found["results"]:
        yield (
            "No implementation was run, for these reasons."
            if found["not_run"]
            else "No implementation was run. Install a backend for this machine."
        )


LEGEND = (
    "worst: the largest error as a multiple of the contract's tolerance; 1 is the limit. same bits:"
    " a row gets equal bits in the same batch (runs), and in any batch (batches). `vllm-fl tune` "
    "measures times."
)


def _heading(found: Mapping[str, Any]) -> str:
    environment = found["environment"]
    device = environment["device"]
    versions = ", ".join(f"{name} {v}" for name, v in environment["distributions"].items())
    emulated = f" EMULATED ({environment['emulated']})" if environment["emulated"] else ""
    return (
        f"{device['type']}: {device['name']}{emulated}; Python {environment['python']}; "
        f"{versions}; {found['date']}"
    )


def show(found: Mapping[str, Any]) -> None:
    say(_heading(found))
    if "kept" in found:
        from ._replay import heading

        for line in heading(found["kept"]):
            say(line)
    if found["results"]:
        print_table(HEADINGS, _rows(found["results"]))
        say(LEGEND)
    for line in _details(found["results"]):
        say(line)
    if found["not_run"]:
        say("Not run:")
    for line in _not_run(found):
        say(f"  {line}")
