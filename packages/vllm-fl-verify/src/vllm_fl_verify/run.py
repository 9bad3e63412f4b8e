"""Calls of one implementation in one dtype during verification."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch

from vllm_fl.contracts import Sample
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.inspection import FAILED, Objection
from vllm_fl.plugins.types import OpImpl

from . import process_state
from .batches import POOL, Order
from .budget import Budget
from .expected import Deviation
from .form import Form
from .guarded import Guarded, copy_rows, joined_rows
from .oracle import each_part, parts
from .trials import Request, Role, Trials
from .verification import (
    Comparison,
    Outcome,
    as_call,
    called,
    compare,
    compared,
    dtype_name,
    misuse,
    shares,
    try_call,
)

ONCE = 32.0
"""Maximum weight, in calls, for repeating a batch with more tokens than the pool has rows. On a
CPU, larger batches take much of the startup time."""

WARM_CALLS = 4000.0
"""Calls of all warm-ups at token counts that were not tried before. The implementations share them
equally."""

LOWERED = 3
"""Forms that are lowered per request. Later forms are only traced. With a cold cache, a C++
compiler takes seconds for each form."""

TRACED = 12
"""Further forms that are traced. An implementation's first form is always traced."""

Objections = Generator[Objection, None, None]
"""Objections of a check. Only the first is used."""

CheckedCall = Generator[Objection, None, Any]
"""Objections to a call. Returns the call's result, or None if the call is not supported."""


class SharedState:
    """State that the runs of one request share. `watch` logs slow calls."""

    def __init__(self, request: Request, watch: breadcrumb.Watchdog) -> None:
        self.request, self.watch = request, watch
        self.left_out: dict[str, set[str]] = defaultdict(set)
        """Description of an omitted check -> implementations."""
        self.warmed = sum(1 for role in request.roles if role.warm)
        self.lowered = Budget(LOWERED, request.valve)
        self.traced = Budget(TRACED, request.valve)


class Run:
    def __init__(self, startup: SharedState, role: Role, trials: Trials, dtypes: int) -> None:
        self.startup, self.request, self.role, self.trials = startup, startup.request, role, trials
        self.impl, self.spec = role.impl, trials.spec
        self.call = as_call(self.impl, self.spec, self.request.layer_for)
        self.warm_calls = WARM_CALLS / max(1, startup.warmed) / dtypes
        self.before = process_state.state_of(trials.device)
        self.refusals: list[str] = []
        self.served: set[str] = set()
        self.tried: set[tuple[str, int]] = set()
        """(form, token count) of compared batches."""
        self.was_slow = False
        self.latest: Callable[[], Sample] | None = None
        """Returns the last call that was made or compared."""

    def changed(self) -> str | None:
        """Return a description of process state that the implementation has changed, or None."""
        with torch.inference_mode(False):
            problem = process_state.changed(self.before, self.trials.device, self._again)
        return None if problem is None else f"it changed {problem} for the whole process"

    def _again(self) -> None:
        """Repeat some calls without comparison, to attribute changes of the process state."""
        with torch.inference_mode():
            for sample in self.trials.samples:
                self.compared(self.impl, sample, wanted=())
            for form in self.forms_served:
                for count in {self.trials.smallest, self.trials.few, self.trials.largest}:
                    next(self.call_at(form, count), None)

    @property
    def name(self) -> str:
        return f"{self.impl.op_name}={self.impl.impl_id}"

    @property
    def forms(self) -> list[Form]:
        return self.trials.forms

    @property
    def forms_served(self) -> list[Form]:
        """Supported forms. Only these are captured and compiled."""
        return [form for form in self.forms if form.name in self.served]

    def leave_out(self, what: str, further: str = "") -> None:
        self.startup.left_out[what].add(f"{self.spec.name} of {self.impl.impl_id}{further}")

    def at(self, where: str, call: Callable[[], Outcome], *, compiles: bool = False) -> CheckedCall:
        """Make one call. Record an unsupported call, and object to a failure. Slow calls are
        logged. Two slow calls in a row would stall the engine and are a failure, unless the call
        `compiles`."""
        watch = self.startup.watch
        with watch.over(f"one call of {self.name} ({where})"):
            got, failure = call()
        if failure is not None and failure.status == "refused":
            self.refusals.append(f"{where}: {failure.reason}")
            return None
        if failure is not None:
            yield Objection(FAILED, f"{failure} ({where})")
        slow = watch.seconds > breadcrumb.SLOW and not compiles
        if slow and self.was_slow:
            yield Objection(FAILED, f"it takes {watch.seconds:.0f} s for one call ({where})")
        self.was_slow = slow
        return got

    def where(self, form: Form, count: int, more: str = "") -> str:
        return f"{count} x {form.name}, {dtype_name(self.trials.dtype)}{more}"

    def compared(self, impl: OpImpl, sample: Sample, **how: Any) -> Comparison:
        """Compare one sample. `how` is as for `verification.compare`."""
        layer_for = self.request.layer_for
        return compare(impl, self.spec, sample, self.trials.dtype, layer_for=layer_for, **how)

    def sampled(self, sample: Sample, **how: Any) -> CheckedCall:
        self.latest = lambda: sample
        run = partial(self.compared, self.impl, sample, **how)
        result = yield from self.at(sample.name, lambda: (run(), None))
        yield from self.judge(result)
        return result

    def judge(self, result: Comparison) -> Objections:
        """Object to a sample that raised, or that is incorrect if results are compared."""
        if result.status == "raised" or (result.status == "wrong" and self.request.compares):
            what = "it is incorrect: " if result.status == "wrong" else ""
            yield Objection(FAILED, f"{what}{result.reason} ({result.sample}, {result.dtype})")

    def compare(
        self,
        form: Form,
        rows: torch.Tensor,
        got: Any,
        where: str,
        *,
        large: bool = False,
        wrong: str = "it is incorrect",
    ) -> Objections:
        self.latest = partial(self._sample, form, rows, large)
        if not self.request.compares:
            return
        _, failure = compared(got, partial(form.deviation, large, rows))
        if failure is not None:
            did = f"{wrong}: " if failure.status == "wrong" else ""
            yield Objection(FAILED, f"{did}{failure.reason} ({where})")

    def batches(
        self, form: Form, series: Sequence[tuple[int, Order]], *, large: bool = False
    ) -> Objections:
        """Compare batches one after the other in the same memory. All results are kept to the end.

        Args:
            series: (tokens, order of the rows) of each batch; the first batch is the largest.
        """
        laid: Guarded | None = None
        results: list[tuple[str, torch.Tensor, Any]] = []
        first = series[0][0]
        is_large = first > POOL and form.calls(first) > ONCE
        for number, (tokens, order) in enumerate(series):
            # A slow call is repeated, to find out whether it stalls.
            if number and is_large and tokens >= first - 1 and not self.was_slow:
                self.leave_out("fewer batches than usual")
                continue
            self.tried.add((form.name, tokens))
            rows = self.trials.rows(tokens, number, order)
            laid = copy_rows(form.pool(large), rows, into=laid)
            self.latest = partial(self._sample, form, rows, large)
            where = self.where(form, tokens, ", large values" * large)
            got = yield from self.result(form, laid, where)
            if got is None:
                return
            said = f"{where}, same buffers again" if number else where
            results.append((said, rows, _kept(got, form.call(laid))))
        if not self.request.compares or self._together(form, large, results):
            return
        for where, rows, got in results:
            yield from self.compare(form, rows, got, where, large=large)

    def _together(self, form: Form, large: bool, results: Sequence[tuple[str, Any, Any]]) -> bool:
        """Whether one comparison shows that the results of several batches are correct."""
        if self.spec.whole_batch or len(results) < 2:
            return False

        def deviation(_: None) -> Deviation:
            each = zip(*(parts(got) for _, _, got in results), strict=True)
            joined = tuple(None if some[0] is None else joined_rows(some) for some in each)
            got = joined if isinstance(results[0][2], tuple) else joined[0]
            return form.deviation(large, torch.cat([rows for _, rows, _ in results]), got)

        return compared(None, deviation)[1] is None

    def result(self, form: Form, laid: Guarded, where: str) -> CheckedCall:
        call = form.call(laid)
        consumed = self.spec.consumed(self.impl.consumes, call.args)
        form.static.restore(consumed)  # the previous call wrote into a cache

        def run() -> Outcome:
            making = partial(try_call, self.call, self.impl, self.spec, call.args)
            if self.request.compares:
                laid.remember()
                got, failure = called(making, self.impl, self.spec, call, looked_at=laid)
            else:
                got, failure = making()
            if failure is None:
                self.served.add(form.name)
            return got, failure

        return (yield from self.at(where, run))

    def call_at(self, form: Form, count: int) -> Objections:
        args = self.arguments(form, self.trials.rows(count))
        where = self.where(form, count)
        yield from self.at(where, partial(try_call, self.call, self.impl, self.spec, args))

    def arguments(self, form: Form, rows: torch.Tensor, large: bool = False) -> tuple[Any, ...]:
        self.latest = partial(self._sample, form, rows, large)
        args = form.call(copy_rows(form.pool(large), rows)).args
        form.static.restore(self.spec.consumed(self.impl.consumes, args))
        return args

    def _sample(self, form: Form, rows: torch.Tensor, large: bool) -> Sample:
        """Return a batch as a sample, to keep it."""
        scale = form.samples[large].scale
        return Sample(self.where(form, len(rows)), self.arguments(form, rows, large), scale)

    def intact(self, form: Form) -> Objections:
        """Object to changed weights and tables, unless they are consumed."""
        consumed = self.spec.consumed(self.impl.consumes, form.samples[0].args)
        problem = misuse(form.static, consumed, self.impl, self.spec)
        if problem and self.request.compares:
            yield Objection(FAILED, f"it is incorrect: {problem} ({form.name})")


def _kept(result: Any, laid: Guarded) -> Any:
    """Copy the parts of a result that share memory with the arguments `laid`."""

    def kept(part: torch.Tensor) -> torch.Tensor:
        lies_there = any(shares(part, storage.memory) for storage in laid.storages)
        return part.clone() if lies_there else part

    return each_part(result, kept)
