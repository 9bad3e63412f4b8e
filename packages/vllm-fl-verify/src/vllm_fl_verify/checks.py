"""The checks of verification. Each yields objections. The first objection ends the run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch

from vllm_fl.contracts import OpSpec
from vllm_fl.engine.opaque import is_opaque
from vllm_fl.logs import get_logger
from vllm_fl.plugins.inspection import FAILED, REFUSES, REJECTED, Objection

from . import graphs, launches
from .batches import Order
from .budget import Budget
from .form import Form
from .guarded import copy_rows, dirty_memory, freed_nan, laid_like, taken
from .oracle import parts
from .run import CheckedCall, Objections, Run
from .trials import lowered, token_counts
from .verification import BY_CHAIN, Outcome, accept, attempt, bias_problem, dtype_name, try_call

log = get_logger("engine")


LARGE_COUNTS = (1, 7, 64, 256)
"""Token counts for large values, in addition to the largest batch. Large values reveal errors in
numbers, and in the tiles that a kernel uses for many rows."""

ORDERS: tuple[Order, ...] = ("consecutive", "drawn", "repeated", "alike")
"""Batches per token count, tried one after the other in the same memory. For more than 64 tokens,
only the first three are tried, the third with one row less.
"""

FREED = 2**21
"""Maximum bytes of a freed block. For larger blocks, the system returns zeroed memory."""

TOGETHER = 8
"""Number of further batches that share memory and are compared together."""

COMPILED_COUNTS = (5, 7, 33, 300)
"""Token counts of the compiled form. It has one graph for all counts, as in vLLM. 0 and 1 are not
included, because torch would create separate graphs for them."""


def _samples(run: Run) -> Objections:
    """Compare the contract's samples, and calls with fixed batches."""
    trials, refused, results = run.trials, [], []
    memories = trials.shared()
    for index, (sample, wanted) in enumerate(zip(trials.samples, trials.wanted, strict=True)):
        memory = memories.get(index)
        result = yield from run.sampled(sample, wanted=wanted, memory=memory)
        results.append(result)
        if result.status == "refused" and memory is not None:
            refused.append(f"{sample.name}, {result.dtype}: {result.reason}")
    if refused and len(refused) == len(trials.fixed_samples):
        yield _refuses_all(refused[0])
    if run.request.compares and (problem := bias_problem(results)):
        yield Objection(FAILED, f"it is incorrect: {problem} ({dtype_name(trials.dtype)})")


def _refuses_all(why: str) -> Objection:
    return Objection(REJECTED, f"{REFUSES} ({why})")


def _process(run: Run) -> Objections:
    if problem := run.changed():
        yield Objection(FAILED, problem)


def _batches(run: Run) -> Objections:
    """Compare the served model's calls at the token counts that are always tried."""
    smallest, largest = run.trials.smallest, run.trials.largest
    always, _ = token_counts(largest, run.trials.seed, smallest)
    for form in run.forms:
        form.switch(large=False)
        for count in always:
            orders = ORDERS if count <= 64 else ORDERS[:2]
            less: Order = "drawn" if count <= 64 else ORDERS[2]
            series = [(count, order) for order in orders] + [(count - 1, less)] * (count > smallest)
            yield from run.batches(form, series)
        yield from _in_another_thread(run, form)
        yield from run.intact(form)
        form.switch(large=True)
        for count in (count for count in LARGE_COUNTS if smallest <= count < largest):
            yield from run.batches(form, [(count, order) for order in ORDERS[:2]], large=True)
        yield from run.batches(form, [(largest, ORDERS[1])], large=True)
        yield from run.intact(form)


def _in_another_thread(run: Run, form: Form) -> Objections:
    """Compare a batch in a different thread, because vLLM runs micro-batches in threads."""

    def look() -> Objection | None:
        device = run.trials.device
        if device.index is not None:
            torch.get_device_module(device).set_device(device)
        with torch.inference_mode():
            series = [(run.trials.few, order) for order in ORDERS[:2]]
            return next(run.batches(form, series), None)

    with ThreadPoolExecutor(1, "vllm-fl verification") as thread:
        objection = thread.submit(look).result()
    if objection is not None:
        yield Objection(objection.code, f"in another thread: {objection.reason}")


def _dirty_memory(run: Run) -> Objections:
    """Compare calls while uninitialised memory contains NaN."""
    if run.spec.caches:
        return
    trials, counts = run.trials, {run.trials.few, *run.trials.among(LARGE_COUNTS)}
    with dirty_memory():
        for sample, wanted in zip(trials.samples, trials.wanted, strict=True):
            if not (sample.relaid or sample.enlarged or run.spec.fixed_batch):
                yield from run.sampled(sample, wanted=wanted)
        direct, run.call = run.call, partial(_over_freed, run, run.call)
        try:
            for form in run.forms:
                form.switch(large=False)
                yield from run.batches(form, _in_turn(counts))
        finally:
            run.call = direct


def _over_freed(run: Run, call: Callable[..., Any], *args: Any) -> Any:
    """Make a call that reuses freed memory, which contains NaN or the results for other rows."""
    spec, calls = run.spec, [args]
    if not (spec.whole_batch or run.impl.consumes):
        order = torch.arange(spec.tokens(args)).roll(1)
        calls.insert(0, spec.with_changed_rows(args, lambda x: laid_like(taken(x, order), x)))
    nbytes = sorted({x.nbytes for x in spec.with_rows(args).values()})
    sizes = [n for most in nbytes for n in (most // 2, most, 2 * most) if 0 < n <= FREED]
    result = None
    for each in calls:
        result = None  # frees its memory for the next call
        held = freed_nan(sizes, run.trials.device)
        result = call(*each)
        del held
    return result


def _further_batches(run: Run) -> Objections:
    """Compare further token counts within the budget, first those that run different kernels."""
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
        for count in launches.launch_edges(kernels, *known):
            yield from raised
            yield from run.batches(form, _in_turn({count, max(count - 1, trials.smallest)}))
        yield from raised
    left = [count for count in further if count not in run.role.warm]
    tried, calls = 0, [(n, sum(form.calls(n) for form in run.forms)) for n in left]
    fitting = (n for n, _ in takewhile(lambda each: budget.takes(what, each[1]), calls))
    while some := [*islice(fitting, TOGETHER)]:
        tried += len(some)
        for form in run.forms:
            yield from run.batches(form, _in_turn(some))
    if tried < len(left):
        run.leave_out("fewer batches than usual")
    for form in run.forms:
        yield from run.intact(form)


def _in_turn(counts: Iterable[int]) -> list[tuple[int, Order]]:
    """Return a series of batches, the largest first. Their rows are alternately drawn and
    in order."""
    return [(n, ORDERS[1 - i % 2]) for i, n in enumerate(sorted(counts, reverse=True))]


def _takes_some(run: Run) -> Objections:
    if run.forms and not run.served:
        yield from _process(run)
        yield _refuses_all(run.refusals[0])


def _warm_up(run: Run) -> Objections:
    """Compare at the token counts of the warm-up, to compile all kernels."""
    budget, what = Budget(run.warm_calls, run.request.valve), f"the warm-up of {run.name}"
    warm = run.role.warm
    for form in run.forms if warm else ():
        form.switch(large=False)
    for at in range(0, len(warm), TOGETHER):
        for form in run.forms:
            left = [n for n in warm[at : at + TOGETHER] if (form.name, n) not in run.tried]
            if left and not budget.takes(what, sum(map(form.calls, left))):
                run.leave_out("not warmed up at some sizes", f" from {min(left)} tokens on")
                return
            if left and not run.role.kept:
                yield from run.batches(form, _in_turn(left))
            for count in left if run.role.kept else ():
                yield from run.call_at(form, count)


def _drawn_calls(run: Run) -> Objections:
    """Compare a call of each form, at a size that is drawn for this startup."""
    trials = run.trials
    for form in run.forms:
        form.switch(large=False)
        for count in trials.drawn_counts():
            yield from run.batches(form, [(count, ORDERS[1])])
            if form.name in run.served:
                break
        yield from run.intact(form)
    for sample in () if run.forms else trials.drawn_samples():
        result = yield from run.sampled(sample)
        if result.status != "refused":
            break


def _captured(run: Run) -> Objections:
    """Capture a call in a CUDA graph, and replay it with different values in the same memory."""
    count, trials = run.role.captured, run.trials
    for form in run.forms if count else ():
        form.switch(large=False)
        where = run.where(form, count, ", in a graph")
        laid = copy_rows(form.pool(False), trials.rows(count))
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
            copy_rows(form.pool(large), rows, into=laid)
            raised = "it raised when the graph was replayed:"
            yield from run.at(where, partial(attempt, raised, replay))
            values = "large" if large else "other"
            wrong = f"it is incorrect when a graph is replayed with {values} values"
            yield from run.compare(form, rows, result, where, large=large, wrong=wrong)
        seconds = time.monotonic() - begun
        log.debug("%s=%s captured in %.2f s (%s)", *run.role.key, seconds, where)


def _capture(run: Run, args: tuple[Any, ...]) -> Outcome:
    def capture(*given: Any) -> tuple[Callable[[], None], Any]:
        return graphs.captured(partial(run.call, *given), run.trials.device)

    if (failure := accept(run.impl, run.spec, args)) is not None:
        return None, failure
    return attempt("it cannot be captured in a graph:", capture, *args)


def _compiled(run: Run) -> Objections:
    """Compile the form that the compiler will get, in one graph for all batches. For an opaque
    operator, the compiler sees only which arguments are present, and their strides. All contiguous
    calls are therefore equal for it. An operator that overwrites nothing is only traced, because
    Inductor's code would only call it.
    """
    startup, backend = run.startup, run.request.backend
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
        if startup.lowered.takes(what):
            yield from _in_one_graph(run, form, backend)
            continue
        if not startup.traced.takes(what) and number > 0:
            run.leave_out("compiled in fewer forms than usual")
            break
        yield from _in_one_graph(run, form, "aot_eager")
        if backend != "aot_eager":
            run.leave_out("traced, not lowered")


def _in_one_graph(run: Run, form: Form, backend: str) -> Objections:
    assert run.role.compiled is not None
    call = lowered(run.role.compiled, backend)
    counts = run.trials.among(COMPILED_COUNTS)
    for count, large in [*((n, False) for n in counts), (counts[-1], True)]:
        form.switch(large)
        values = ", large values" * large
        where = f"compiled by {backend}, {run.where(form, count, values)}"
        rows = run.trials.rows(count)
        args = _apart(run.spec, run.arguments(form, rows, large))
        got = yield from _as_compiled(run, call, args, where, again=large or count != counts[0])
        if got is None:
            return
        yield from run.compare(form, rows, got, where, large=large)
    form.switch(large=False)
    if run.spec.whole_batch or not run.trials.promises_nan:
        return
    where = f"compiled by {backend}, a row with NaN, {run.where(form, counts[0])}"
    args, same = (_apart(run.spec, _with_nan(run, form, counts[0])) for _ in range(2))
    got = yield from _as_compiled(run, call, args, where, again=True)
    eager = yield from run.at(where, partial(try_call, run.call, run.impl, run.spec, same))
    if got is None or eager is None or not run.request.compares:
        return
    for mine, other in zip(parts(got), parts(eager), strict=True):
        if other is not None and not torch.equal(mine.isnan(), other.isnan()):
            what = "uncompiled, other elements are NaN"
            yield Objection(FAILED, f"it is incorrect: {what} ({where})")


def _with_nan(run: Run, form: Form, count: int) -> tuple[Any, ...]:
    args = run.arguments(form, run.trials.rows(count))
    rows = (x for x in run.spec.with_rows(args).values() if x.is_floating_point())
    for x in islice(rows, 1):
        x[(-1, *[0] * (x.ndim - 1))] = math.nan
    return args


def _as_compiled(
    run: Run, call: Any, args: Sequence[Any], where: str, *, again: bool
) -> CheckedCall:
    """Call the compiled form. With `again`, a recompilation is an error."""
    lowering = partial(attempt, "it cannot be compiled:", call, *args, refuses=BY_CHAIN)
    with torch._dynamo.config.patch(error_on_recompile=again):
        return (yield from run.at(where, lowering, compiles=True))


STARTUP_CHECKS: tuple[Callable[[Run], Objections], ...] = (
    _samples,
    _process,
    _batches,
    _dirty_memory,
    _further_batches,
    _takes_some,
    _warm_up,
    _captured,
    _compiled,
    _process,
)

KEPT_CHECKS: tuple[Callable[[Run], Objections], ...] = (_drawn_calls, _warm_up, _process)
"""The checks of an implementation that an earlier startup has verified with the same key."""


def _apart(spec: OpSpec, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with each activation in its own memory. Strides do not change. Heads of
    one projection are views that the model's graph creates. torch treats them differently as inputs
    of a graph that writes to them: their memory becomes one input without a dynamic size."""

    def place(arg: Any) -> int:
        return int(arg.untyped_storage().data_ptr()) if isinstance(arg, torch.Tensor) else 0

    seen = Counter(map(place, args))
    return tuple(
        laid_like(arg, arg)
        if name in spec.by_token and place(arg) and seen[place(arg)] > 1
        else arg
        for name, arg in spec.named(args).items()
    )
