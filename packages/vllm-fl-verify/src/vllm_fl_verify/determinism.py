"""Measurement of determinism: does a row have the same bits in every run and in every batch?

Kernels do not declare these properties. Both are measured on the engine's device, at the served
model's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

import torch

from vllm_fl.contracts import Exact, OpSpec
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.logs import get_logger
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.types import Impl, OpImpl

from .batches import POOL
from .budget import Budget, Valve
from .form import Form
from .guarded import bits, copy_rows
from .oracle import parts
from .trials import Request, Role, Trials, lowered, token_counts
from .verification import BY_CHAIN, COMPARING, LayerFactory, as_call, attempt, dtype_name, try_call

T = TypeVar("T")

log = get_logger("engine")

BY_CONTRACT = "its contract determines every bit"
"""Why an op that only moves numbers is not measured; the oracle determines its bits."""

NO_ROWS = "its contract has no result for a single token, so batch invariance cannot be measured"

FIXED_BATCH = "its batches cannot be rearranged, so no token occurs in two of them"

VARIANT = "not batch-invariant"
"""Prefix of the result of `variance` if it measured a difference."""

UNKNOWN = "the sizes of its calls are unknown"

UNSUPPORTED = "it does not support the model's sizes"

Bits = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Determinism:
    """Determinism of an implementation in one dtype on one device.

    Args:
        runs: whether two equal calls have equal bits; None if not measured.
        batches: whether a row has equal bits in every batch: by itself, with others, at a different
            position; None if not measured.
        reason: the first difference, or why `runs` or `batches` was not measured; otherwise empty.
    """

    runs: bool | None
    batches: bool | None
    reason: str = ""


def unmeasured(facts: EngineFacts, impls: Iterable[Impl], spec: OpSpec | None) -> dict[str, str]:
    """Return impl id -> why it must not run, for implementations that cannot be measured. The
    result is empty if the engine does not require batch-invariant implementations."""
    asks, settings = facts.wants_invariance, facts.settings
    found: dict[str, str] = {}
    for impl in impls if asks else ():
        why = ""
        if not isinstance(impl, OpImpl):
            why = "it is a class, which is not measured"
        elif spec is not None and _has_no_rows(spec):
            why = NO_ROWS
        elif not settings.compares:
            why = f"VLLM_FL_PREFLIGHT={settings.preflight} does not measure it"
        if why:
            found[impl.impl_id] = f"{asks} is set, and {why}"
    return found


def _has_no_rows(spec: OpSpec) -> bool:
    """Whether no measurement can show that an implementation of the op is batch-invariant. This is
    the case if the contract allows a row of a result to depend on other rows: a different batch is
    then a different call. Ops that only move numbers, and ops that ignore repeated rows, can still
    be measured."""
    return spec.whole_batch and not (spec.ignores_repeats or _is_exact(spec))


def _is_exact(spec: OpSpec) -> bool:
    return bool(spec.outputs) and all(isinstance(output, Exact) for output in spec.outputs)


def determinism_of(
    impl: OpImpl,
    trials: Trials,
    *,
    call: Callable[..., Any] | None = None,
    layer_for: LayerFactory | None = None,
    budget: Budget | None = None,
) -> Determinism:
    """Call an implementation with the same rows in many batches, and compare each row's bits.

    The implementation must have passed verification. If it nevertheless raises, `reason` contains
    the exception.

    Args:
        call: the compiled form. It is called with two or more tokens, because torch would compile a
            separate graph for one token, which the engine does not use. By default the
            implementation itself.
        budget: calls at further token counts; None for no such calls.
    """
    spec = trials.spec
    if not trials.forms:
        return Determinism(None, None, FIXED_BATCH if spec.fixed_batch else UNKNOWN)
    usual = token_counts(trials.largest, trials.seed, trials.smallest)
    least = 1 if call is None else 2
    always, further = ([count for count in some if count >= least] for some in usual)
    function = call or as_call(impl, spec, layer_for)
    with breadcrumb.Watchdog(log) as watch, torch.inference_mode():
        measured = _Measured(impl, trials, function, watch)
        return next(measured.verdicts(always, further, budget or Budget(0.0, Valve())))


Verdicts = Generator[Determinism, None, T]
"""Results of a measurement. Only the first is used."""


@dataclass
class _Measured:
    """One implementation, and its results for each pool, computed as one batch in order.

    Args:
        whole: form's name -> bits of its pool's rows in one batch. None if the batch is not
            supported.
    """

    impl: OpImpl
    trials: Trials
    call: Callable[..., Any]
    watch: breadcrumb.Watchdog
    whole: dict[str, Bits | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = torch.arange(min(POOL, self.trials.largest), device=self.trials.device)

    def verdicts(
        self, always: Sequence[int], further: Sequence[int], budget: Budget
    ) -> Verdicts[None]:
        """Yield the verdict. Try `further` token counts within the budget."""
        spec, forms = self.trials.spec, self.trials.forms
        for form in forms:
            form.switch(large=False)
            self.whole[form.name] = yield from self.bits(form, self.pool)
        served = [form for form in forms if self.whole[form.name] is not None]
        if not served:
            yield Determinism(None, None, UNSUPPORTED)
        by_rows = not spec.whole_batch or (spec.ignores_repeats and not spec.caches)
        for form in served:
            if problem := (yield from self.other_run(form)):
                yield Determinism(False, False if by_rows else None, problem)
        if not by_rows:
            is_exact = _is_exact(spec)
            yield Determinism(True, is_exact or None, BY_CONTRACT if is_exact else NO_ROWS)
        what = f"batch invariance of {self.impl.op_name}={self.impl.impl_id}"
        for number, count in enumerate((*always, *further)):
            calls = sum(2 * form.calls(count) for form in forms)
            if number >= len(always) and not budget.takes(what, calls):
                break
            for form in forms:
                if problem := (yield from self.other_batch(form, count)):
                    yield Determinism(True, False, problem)
        yield Determinism(True, True)

    def other_run(self, form: Form) -> Verdicts[str]:
        again, whole = (yield from self.bits(form, self.pool)), self.whole[form.name]
        if again is not None and whole is not None and not any(map(_differing, again, whole)):
            return ""
        return f"the same call returned different bits ({self._where(form, len(self.pool))})"

    def other_batch(self, form: Form, count: int) -> Verdicts[str]:
        """Return a difference between rows in batches of `count` and in the pool, or an empty
        string."""
        whole, where = self.whole[form.name], self._where(form, count)
        size = len(self.pool)
        for salt in range(4 if count <= 4 else 2):
            rows = self.trials.rows(count, salt)
            got = yield from self.bits(form, rows)
            if (got is None) is not (whole is None):
                taken, refused = (count, size) if whole is None else (size, count)
                return f"it supports a batch of {taken} tokens, but not of {refused} ({where})"
            if got is None or whole is None:
                return ""
            for mine, base in zip(got, whole, strict=True):
                if mine is None or base is None:
                    continue
                by_row = base.ndim > 0 and len(base) == size
                differing = _differing(mine, base[rows] if by_row else base)
                if differing:
                    has = "1 token has" if differing == 1 else f"{differing} tokens have"
                    if not by_row:
                        has = "a result for all tokens has"
                    return f"{has} different bits in batches of {count} and {size} ({where})"
        return ""

    def bits(self, form: Form, rows: torch.Tensor) -> Verdicts[Bits | None]:
        """Return the bits of the results for these rows of the pool, or None if they are not
        supported."""
        spec = self.trials.spec
        laid = form.call(copy_rows(form.pool(False), rows))
        form.static.restore(spec.consumed(self.impl.consumes, laid.args))
        where = f"{self._where(form, len(rows))}, batch invariance"
        with self.watch.over(f"one call of {self.impl.op_name}={self.impl.impl_id} ({where})"):
            got, failure = try_call(self.call, self.impl, spec, laid.args, refuses=BY_CHAIN)
        if failure is not None and failure.status == "refused":
            return None

        def read() -> Bits:
            return [None if part is None else _bits(part) for part in parts(got)]

        found = None
        if failure is None:
            found, failure = attempt(COMPARING, read, refuses=())
        if failure is not None:
            yield Determinism(None, None, failure.reason)
        return found

    def _where(self, form: Form, count: int) -> str:
        return f"{count} x {form.name}, {dtype_name(self.trials.dtype)}"


def _bits(result: torch.Tensor) -> torch.Tensor:
    return bits(result.detach().clone(memory_format=torch.contiguous_format))


def _differing(mine: torch.Tensor | None, base: torch.Tensor | None) -> int:
    if mine is None or base is None:
        return int(mine is not base)
    if mine.shape != base.shape:
        return max(len(mine), 1) if mine.ndim else 1
    differs = mine != base
    return int((differs.flatten(1).any(1) if differs.ndim > 1 else differs).sum())


def variance(request: Request, role: Role, trials: Sequence[Trials]) -> str:
    """Return why a role's implementation is not batch-invariant; empty if it is. `role` must be
    correct. Its compiled form is measured as well. `trials` has one entry per dtype.
    """
    forms: list[tuple[str, Callable[..., Any] | None]] = [("", None)]
    if role.compiled is not None:
        form = lowered(role.compiled, request.backend)
        forms.append((f"compiled by {request.backend}: ", form))
    for each, (how, call) in product(trials, forms):
        given: dict[str, Any] = {"layer_for": request.layer_for, "budget": request.share()}
        with role.running("the measurement of batch invariance"):
            measured = determinism_of(role.impl, each, call=call, **given)
        if measured.batches is not True:
            verb = VARIANT if measured.batches is False else "not known to be batch-invariant"
            return f"{verb}: {how}{measured.reason}"
    return ""
