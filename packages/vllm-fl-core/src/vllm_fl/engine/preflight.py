"""Running a plan's implementations as they will serve: a wrong kernel is caught by name, at start.

Every candidate is called on the contract's samples and on the served model's sizes, in inference
mode, with many token counts, on guarded memory, twice on the same buffers, with values as large
as activations get; in compiled mode the first choice also as the compiler will have it. What will
serve is then called at further token counts, so that nothing of it is left to compile, and where
vLLM will capture graphs it is captured in one, which is replayed with other values.

Each check is a generator over a `_Run`; the first objection that one yields ends the run
(`_CHECKS`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch

from ..contracts import OpSpec, Sample
from ..contracts.batches import POOL, Order
from ..logs import get_logger
from ..plugins import breadcrumb
from ..plugins.inspection import FAILED, REJECTED, Key, Objection
from ..plugins.types import OpImpl
from ..text import few
from . import graphs, launches, process_state
from .budget import Budget
from .determinism import variance
from .guarded import Guarded, rows_of
from .opaque import is_opaque
from .phases import Phases
from .trials import Form, Request, Role, Trials, lowered, token_counts
from .verification import (
    BY_CHAIN,
    Comparison,
    Outcome,
    accept,
    answer,
    as_call,
    attempt,
    called,
    compare,
    compared,
    dtype_name,
    leaning,
    misuse,
    shares,
)
from .wanted import each_part

log = get_logger("engine")

ONCE = 32.0
"""A batch of more tokens than the pool has rows is tried a second time in the same memory if it is
at most this many calls by its bytes: on a CPU that takes much of a startup."""

WARM_CALLS = 2000.0
"""How many calls the warm-ups of all implementations have, with token counts that were not tried
before; each has an equal share."""

LOWERED = 3
"""How many forms are lowered for one request; the later ones are only traced. A compiler of C++
takes seconds for each when its cache is cold."""

TRACED = 12
"""How many further forms are traced. An implementation's first form is traced in any case."""

LARGE_COUNTS = (1, 7, 64, 256)
"""Token counts of the large values, beside the largest batch: what they show lies in the numbers,
and in the tiles that a kernel takes for many rows."""

ORDERS: tuple[Order, ...] = ("standing", "drawn", "repeated", "alike")
"""The batches of so many tokens that are tried one after the other in the same memory. Of more than
64, only the first two are, and the third with one row less."""

HOST_THREADS = 8
"""How many threads of the host compute the oracle at most: with the 64 of a large one small sums
take several times as long."""

COMPILED_COUNTS = (5, 7, 33, 300)
"""Token counts of the compiled form. One graph serves them all, as in vLLM; a graph of its own,
which 0 and 1 would have, is not what serves."""

Objections = Generator[Objection, None, None]
"""What a check finds: it is over with the first one."""

Found = Generator[Objection, None, Any]
"""The same of a call, of which it returns the result; None if there is none."""


@dataclass
class Findings:
    """What was found.

    Args:
        objections: (op, impl id) -> why it must not serve.
        remarks: what was not looked at, one phrase each, for the report.
        smaller: op -> what of its calls was tried in a smaller size than the model's, one phrase
            each; empty where none of them was.
    """

    objections: dict[Key, Objection] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    smaller: dict[str, list[str]] = field(default_factory=dict)


def find_faults(request: Request) -> Findings:
    """Run each implementation on its contract's samples and on the model's own sizes."""
    log.debug("verifying with seed %d", request.seed)
    found = Findings()
    threads = host_threads(request.device)
    with (
        request.valve.verifying(),
        threads,
        breadcrumb.Watchdog(log) as watch,
        request.trials() as trials,
    ):
        start = _Start(request, watch)
        for role in request.roles:
            objection = _look(start, role, trials[role.calls])
            if objection is not None:
                found.objections[role.key] = objection
        ops = defaultdict[str, list[Trials]](list)
        for (op, *_), some in trials.items():
            ops[op] += some
        found.smaller = {op: each for op, some in ops.items() if (each := _smaller(some))}
        calls = {op: any(each.calls for each in some) for op, some in ops.items() if some}
    unknown = [op for op, has_some in calls.items() if request.sizes and not has_some]
    if found.smaller:
        found.remarks.append(f"smaller than served: {', '.join(found.smaller)}")
    if unknown:
        found.remarks.append(f"not verified at its sizes: {', '.join(unknown)}")
    for phrase, names in start.left_out.items():
        found.remarks.append(f"{phrase}: {few(names)}")
    return found


@contextmanager
def host_threads(device: torch.device) -> Iterator[None]:
    """In the block the host of a device computes with few threads.

    Where it serves itself, it does with as many as it will then: vLLM's worker on a CPU warns of
    each setting.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" or before <= HOST_THREADS:
        yield
        return
    torch.set_num_threads(HOST_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _smaller(some: Iterable[Trials]) -> list[str]:
    phrases = (call.smaller for trials in some for call in trials.calls)
    return [*dict.fromkeys(filter(None, phrases))]


class _Start:
    """What the runs of one start share.

    Args:
        request: what is asked.
        watch: names in the log what takes long.
    """

    def __init__(self, request: Request, watch: breadcrumb.Watchdog) -> None:
        self.request, self.watch = request, watch
        self.left_out: dict[str, set[str]] = defaultdict(set)
        """What was not looked at -> of whom."""
        self.warmed = sum(1 for role in request.roles if role.warm)
        self.lowered = Budget(LOWERED, request.valve)
        self.traced = Budget(TRACED, request.valve)


def _look(start: _Start, role: Role, trials: Sequence[Trials]) -> Objection | None:
    """Run one implementation in each dtype of its op, and return why it must not serve."""
    request = start.request
    if not trials:
        known, dtype = request.specs[role.impl.op_name].dtypes, dtype_name(request.dtype)
        return Objection(
            FAILED, f"the contract of its op is for {', '.join(known)}, not for {dtype}"
        )
    refusals = []
    for each in trials:
        with role.running("the verification"):
            objection = _Run(start, role, each, len(trials)).check()
        if objection is not None and objection.code == FAILED:
            return objection
        if objection is not None:
            refusals.append(objection)
    if len(refusals) == len(trials):
        return refusals[0]
    if request.requires and (why := variance(request, role, trials)):
        reason = f"{request.requires}, and it is {why}"
        return Objection(REJECTED, reason, ends_strict=False)
    return None


class _Run:
    """One implementation in one dtype: what is known of it, and how it is called."""

    def __init__(self, start: _Start, role: Role, trials: Trials, dtypes: int) -> None:
        self.start, self.request, self.role, self.trials = start, start.request, role, trials
        self.impl, self.spec = role.impl, trials.spec
        self.call = as_call(self.impl, self.spec, self.request.layer_for)
        self.warm_calls = WARM_CALLS / max(1, start.warmed) / dtypes
        self.before = process_state.state_of(trials.device)
        self.refusals: list[str] = []
        self.served: set[str] = set()
        """The forms of which it has taken a call."""
        self.tried: set[tuple[str, int]] = set()
        """(form, token count) of the batches that were compared."""
        self.was_slow = False

    def check(self) -> Objection | None:
        """Run the checks, and return the first objection."""
        seconds = Phases()
        try:
            with torch.inference_mode():
                for check in _CHECKS:
                    with seconds.during(check.__name__.strip("_").replace("_", " ")):
                        if (objection := next(check(self), None)) is not None:
                            return objection
            return None
        except Exception:  # of ours, where the implementation has spoiled what we rely on
            if (problem := self.changed()) is None:
                raise
            return Objection(FAILED, problem)
        finally:
            took = ", ".join(f"{what} {n:.1f} s" for what, n in seconds.seconds.items() if n >= 0.1)
            log.debug("%s=%s: %s", *self.role.key, took or "no time")
            process_state.restore(self.before, self.trials.device)
            if others := self.before.others:
                self.start.left_out["not watched, since other threads change it"] |= others

    def changed(self) -> str | None:
        """What it has changed of the process, in words."""
        with torch.inference_mode(False):
            problem = process_state.changed(self.before, self.trials.device, self._again)
        return None if problem is None else f"it changed {problem} of the whole process"

    def _again(self) -> None:
        """Some of its calls once more, for what they change of the process; nothing is compared."""
        with torch.inference_mode():
            for sample in self.trials.samples:
                self.compared(self.impl, sample, wanted=())
            for form in self.forms_served:
                for count in {self.trials.smallest, self.trials.few, self.trials.largest}:
                    next(self.call_at(form, count), None)

    @property
    def name(self) -> str:
        """`rms_norm=vendor.acme`."""
        return f"{self.impl.op_name}={self.impl.impl_id}"

    @property
    def forms(self) -> list[Form]:
        """The served model's calls."""
        return self.trials.forms

    @property
    def forms_served(self) -> list[Form]:
        """Those that it takes. One that is refused stays with the implementation that comes next:
        of this one, there is nothing to capture or compile."""
        return [form for form in self.forms if form.name in self.served]

    def leave_out(self, what: str, further: str = "") -> None:
        """Note for the report what was not looked at."""
        self.start.left_out[what].add(f"{self.spec.name} of {self.impl.impl_id}{further}")

    def at(self, where: str, call: Callable[[], Outcome], *, compiles: bool = False) -> Found:
        """Make one call. A refusal is noted, a failure is an objection that names the call.

        It is named in the log while it takes long. Two slow calls in a row are a failure: it would
        stall the engine. One that `compiles` may take as long as it likes.
        """
        watch = self.start.watch
        with watch.over(f"one call of {self.name} ({where})"):
            got, failure = call()
        if failure is not None and failure.status == "refused":
            self.refusals.append(f"{where}: {failure.reason}")
            return None
        if failure is not None:
            yield Objection(FAILED, f"{failure} ({where})")
        slow = watch.seconds > breadcrumb.SLOW and not compiles
        if slow and self.was_slow:
            yield Objection(FAILED, f"takes {watch.seconds:.0f} s for one call ({where})")
        self.was_slow = slow
        return got

    def where(self, form: Form, count: int, more: str = "") -> str:
        """A batch in words."""
        return f"{count} x {form.name}, {dtype_name(self.trials.dtype)}{more}"

    def compared(self, impl: OpImpl, sample: Sample, **how: Any) -> Comparison:
        """One sample, run and compared; how else than by the oracle, as for `compare`."""
        layer_for = self.request.layer_for
        return compare(impl, self.spec, sample, self.trials.dtype, layer_for=layer_for, **how)

    def judge(self, result: Comparison) -> Objections:
        """Object to a sample that raised, or that is wrong if results are compared."""
        if result.status == "raised" or (result.status == "wrong" and self.request.compares):
            what = "it is wrong: " if result.status == "wrong" else ""
            yield Objection(FAILED, f"{what}{result.reason} ({result.sample}, {result.dtype})")

    def compare(
        self,
        form: Form,
        rows: torch.Tensor,
        got: Any,
        where: str,
        *,
        large: bool = False,
        wrong: str = "it is wrong",
    ) -> Objections:
        """Object to a batch's results that are off, or cannot be compared."""
        if not self.request.compares:
            return
        _, failure = compared(got, partial(form.off, large, rows))
        if failure is not None:
            did = f"{wrong}: " if failure.status == "wrong" else ""
            yield Objection(FAILED, f"{did}{failure.reason} ({where})")

    def batches(
        self,
        form: Form,
        count: int,
        orders: Iterable[Order],
        *,
        less: Order | None = None,
        large: bool = False,
    ) -> Objections:
        """Compare batches one after the other in the same memory, their results kept to the end.

        Args:
            form: the call.
            count: tokens of each.
            orders: how each takes its rows.
            less: how another one does, of one token less, as where a request has ended.
            large: whether its values are.
        """
        self.tried.add((form.name, count))
        batches = [(count, order) for order in orders]
        if less is not None and count > self.trials.smallest:
            batches.append((count - 1, less))
        laid: Guarded | None = None
        results: list[tuple[str, torch.Tensor, Any]] = []
        is_large = count > POOL and form.calls(count) > ONCE
        for number, (tokens, order) in enumerate(batches):
            if number > 0 and is_large and not self.was_slow:  # what stalls is called again
                self.leave_out("fewer batches than usual")
                break
            rows = self.trials.rows(tokens, number, order)
            laid = rows_of(form.pool(large), rows, into=laid)
            where = self.where(form, tokens, ", large values" * large)
            got = yield from self.result(form, laid, where)
            if got is None:
                return
            said = f"{where}, same buffers again" if number else where
            results.append((said, rows, _kept(got, form.call(laid))))
        for where, rows, got in results:
            yield from self.compare(form, rows, got, where, large=large)

    def result(self, form: Form, laid: Guarded, where: str) -> Found:
        """Make one call in the memory `laid`."""
        call = form.call(laid)
        consumed = self.spec.consumed(self.impl.consumes, call.args)
        form.static.restore(consumed)  # a cache: the call before has written into it

        def run() -> Outcome:
            making = partial(answer, self.call, self.impl, self.spec, call.args)
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
        """Make one call with so many tokens, of which nothing is compared."""
        args = self.arguments(form, self.trials.rows(count))
        where = self.where(form, count, ", warming up")
        yield from self.at(where, partial(answer, self.call, self.impl, self.spec, args))

    def arguments(self, form: Form, rows: torch.Tensor) -> tuple[Any, ...]:
        """Those of a call with these rows of the ordinary values."""
        args = form.call(rows_of(form.pool(False), rows)).args
        form.static.restore(self.spec.consumed(self.impl.consumes, args))
        return args

    def intact(self, form: Form) -> Objections:
        """Object if weights and tables are not as before all calls, but for consumed ones."""
        consumed = self.spec.consumed(self.impl.consumes, form.samples[0].args)
        problem = misuse(form.static, consumed, self.impl, self.spec)
        if problem and self.request.compares:
            yield Objection(FAILED, f"it is wrong: {problem} ({form.name})")


def _samples(run: _Run) -> Objections:
    """The contract's own samples, edges that every caller may bring, and calls that stand."""
    trials, refused, results = run.trials, [], []
    memories = trials.shared()
    for index, (sample, wanted) in enumerate(zip(trials.samples, trials.wanted, strict=True)):
        memory = memories.get(index)
        look = partial(run.compared, run.impl, sample, wanted=wanted, memory=memory)
        result = yield from run.at(sample.name, lambda look=look: (look(), None))  # type: ignore[misc]
        yield from run.judge(result)
        results.append(result)
        if result.status == "refused" and memory is not None:
            refused.append(f"{sample.name}, {result.dtype}: {result.reason}")
    if refused and len(refused) == len(trials.standing):
        yield _refuses_all(refused[0])
    if run.request.compares and (problem := leaning(results)):
        yield Objection(FAILED, f"it is wrong: {problem} ({dtype_name(trials.dtype)})")


def _refuses_all(why: str) -> Objection:
    return Objection(REJECTED, f"it refuses every call of this model ({why})")


def _process(run: _Run) -> Objections:
    """The state of the process is as it was."""
    if problem := run.changed():
        yield Objection(FAILED, problem)


def _batches(run: _Run) -> Objections:
    """The served model's calls with the token counts that are always tried."""
    smallest, largest = run.trials.smallest, run.trials.largest
    always, _ = token_counts(largest, run.trials.seed, smallest)
    for form in run.forms:
        form.switch(large=False)
        for count in always:
            orders = ORDERS if count <= 64 else ORDERS[:2]
            less: Order = "drawn" if count <= 64 else ORDERS[2]
            yield from run.batches(form, count, orders, less=less)
        yield from _in_another_thread(run, form)
        yield from run.intact(form)
        form.switch(large=True)
        for count in (count for count in LARGE_COUNTS if smallest <= count < largest):
            yield from run.batches(form, count, ORDERS[:2], large=True)
        yield from run.batches(form, largest, ORDERS[1:2], large=True)
        yield from run.intact(form)


def _in_another_thread(run: _Run, form: Form) -> Objections:
    """A batch in another thread than the one that builds the model, as micro-batches have."""

    def look() -> Objection | None:
        device = run.trials.device
        if device.index is not None:
            torch.get_device_module(device).set_device(device)
        with torch.inference_mode():
            return next(run.batches(form, run.trials.few, ORDERS[:2]), None)

    with ThreadPoolExecutor(1, "vllm-fl verification") as thread:
        objection = thread.submit(look).result()
    if objection is not None:
        yield Objection(objection.code, f"in another thread {objection.reason}")


def _further_batches(run: _Run) -> Objections:
    """Further token counts while calls are left, first those where it launches other kernels."""
    trials = run.trials
    _, further = token_counts(trials.largest, trials.seed, trials.smallest)
    budget, what = run.request.share(), f"further batches of {run.name}"
    raised: list[Objection] = []
    for form in run.forms:
        form.switch(large=False)

        def kernels(count: int, form: Form = form) -> launches.Launched:
            def call() -> None:
                budget.takes(what, form.calls(count))
                raised.extend(islice(run.call_at(form, count), 1))

            return run.request.launched(call, trials.device)

        known = trials.smallest, trials.largest, partial(budget.takes, what, 0.0)
        for count in launches.edges(kernels, *known):
            yield from raised
            yield from run.batches(form, count, ORDERS[1:2], less=ORDERS[0])
        yield from raised
    for count in further:
        if not budget.takes(what, sum(2 * form.calls(count) for form in run.forms)):
            run.leave_out("fewer batches than usual")
            break
        for form in run.forms:
            yield from run.batches(form, count, ORDERS[1:2], less=ORDERS[0])
    for form in run.forms:
        yield from run.intact(form)


def _takes_some(run: _Run) -> Objections:
    """It takes some call of the served model."""
    if run.forms and not run.served:
        yield from _process(run)
        yield _refuses_all(run.refusals[0])


def _warm_up(run: _Run) -> Objections:
    """What it compiles when it is called, it has compiled afterwards."""
    budget, what = Budget(run.warm_calls, run.request.valve), f"the warm-up of {run.name}"
    for form in run.forms if run.role.warm else ():
        form.switch(large=False)
    for count in run.role.warm:
        for form in (form for form in run.forms if (form.name, count) not in run.tried):
            if not budget.takes(what, form.calls(count)):
                run.leave_out("not warmed up at some sizes", f" from {count} tokens on")
                return
            yield from run.call_at(form, count)


def _captured(run: _Run) -> Objections:
    """In a captured graph, which is replayed with other values in the same memory."""
    count, trials = run.role.captured, run.trials
    for form in run.forms if count else ():
        form.switch(large=False)
        where = run.where(form, count, ", in a graph")
        laid = rows_of(form.pool(False), trials.rows(count))
        args = form.call(laid).args
        begun = time.monotonic()
        made = yield from run.at(where, partial(_capture, run, args))
        if made is None:
            continue
        replay, result = made
        for number, large in enumerate((False, True), 1):
            form.switch(large)
            form.static.restore(run.spec.consumed(run.impl.consumes, args))
            rows = trials.rows(count, number)
            rows_of(form.pool(large), rows, into=laid)
            raised = "it raised when the graph was replayed:"
            yield from run.at(where, partial(attempt, raised, replay))
            values = "large" if large else "other"
            wrong = f"it is wrong when a graph is replayed with {values} values"
            yield from run.compare(form, rows, result, where, large=large, wrong=wrong)
        seconds = time.monotonic() - begun
        log.debug("%s=%s captured in %.2f s (%s)", *run.role.key, seconds, where)


def _capture(run: _Run, args: tuple[Any, ...]) -> Outcome:
    def capture(*given: Any) -> tuple[Callable[[], None], Any]:
        return graphs.captured(partial(run.call, *given), run.trials.device)

    if (failure := accept(run.impl, run.spec, args)) is not None:
        return None, failure
    return attempt("it cannot be captured in a graph:", capture, *args)


def _traced(run: _Run) -> Objections:
    """The traced form, which compiled graphs may have in its place: as it is traced, and run as
    it is written."""
    if not run.role.in_graphs or run.impl.traced is None:
        return
    from .traced import trial  # what traces is not loaded for an engine that compiles nothing

    traced = dataclasses.replace(run.impl, fn=run.impl.traced)
    for form in run.forms_served:
        form.switch(large=False)
        for count in run.trials.among(COMPILED_COUNTS[:2]):
            rows = run.trials.rows(count)
            sample = Sample(f"traced, {count} x {form.name}", run.arguments(form, rows))
            if why := trial(run.impl, run.spec, sample.args):
                yield Objection(FAILED, f"{why} ({sample.name})")
            yield from run.judge(run.compared(traced, sample, off=partial(form.off, False, rows)))


def _compiled(run: _Run) -> Objections:
    """The form that the compiler will get, in one graph for all batches.

    Of an operator that it takes whole it sees which arguments there are and how they lie: to it
    calls of contiguous ones are the same in all sizes. One that writes over none of them is traced:
    Inductor lowers such a call to itself.
    """
    start, backend = run.start, run.request.backend
    is_operator = is_opaque(run.impl)
    if is_operator and not run.impl.consumes:
        backend = "aot_eager"
    seen: set[tuple[bool, ...]] = set()
    for number, form in enumerate(run.forms_served if run.role.compiled else ()):
        args = form.samples[0].args
        given = tuple(arg is None for arg in args)
        lies_plain = all(arg.is_contiguous() for arg in args if isinstance(arg, torch.Tensor))
        if given in seen and lies_plain and is_operator:
            continue
        seen.add(given)
        form.switch(large=False)
        what = f"compiled forms of {run.name}"
        if start.lowered.takes(what):
            yield from _in_one_graph(run, form, backend)
            continue
        if not start.traced.takes(what) and number > 0:
            run.leave_out("compiled in fewer forms than usual")
            break
        yield from _in_one_graph(run, form, "aot_eager")
        if backend != "aot_eager":
            run.leave_out("traced, not lowered")


def _in_one_graph(run: _Run, form: Form, backend: str) -> Objections:
    assert run.role.compiled is not None
    call = lowered(run.role.compiled, backend)
    counts = run.trials.among(COMPILED_COUNTS)
    for count in counts:
        where = f"compiled by {backend}, {run.where(form, count)}"
        rows = run.trials.rows(count)
        args = _apart(run.spec, run.arguments(form, rows))
        lowering = partial(attempt, "it cannot be compiled:", call, *args, refuses=BY_CHAIN)
        with torch._dynamo.config.patch(error_on_recompile=count != counts[0]):
            got = yield from run.at(where, lowering, compiles=True)
        if got is None:
            return
        yield from run.compare(form, rows, got, where)


_CHECKS: tuple[Callable[[_Run], Objections], ...] = (
    _samples,
    _process,
    _batches,
    _further_batches,
    _takes_some,
    _warm_up,
    _captured,
    _traced,
    _compiled,
    _process,
)
"""In this order: what is refused or wrong in one is not asked in the next."""


def _apart(spec: OpSpec, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, each activation in memory of its own, of the same strides.

    Heads of one projection are views that a model's graph makes itself. As inputs of a graph that
    writes into them they are another case: torch makes one input of their memory then, whose size
    it does not keep dynamic.
    """

    def place(arg: Any) -> int:
        return int(arg.untyped_storage().data_ptr()) if isinstance(arg, torch.Tensor) else 0

    seen = Counter(map(place, args))
    return tuple(
        arg.new_empty_strided(arg.shape, arg.stride()).copy_(arg)
        if name in spec.by_token and place(arg) and seen[place(arg)] > 1
        else arg
        for name, arg in spec.named(args).items()
    )


def _kept(result: Any, laid: Guarded) -> Any:
    """A result that stays what it is when the memory of the arguments `laid` is written anew."""

    def kept(part: torch.Tensor) -> torch.Tensor:
        lies_there = any(shares(part, storage.memory) for storage in laid.storages)
        return part.clone() if lies_there else part

    return each_part(result, kept)
