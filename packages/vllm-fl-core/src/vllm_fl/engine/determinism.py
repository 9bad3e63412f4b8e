"""Whether an implementation gives the same bits again: in another run, and in another batch.

Nothing here is declared by who wrote it. Both are measured, on the device that serves, at the
served model's own sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..contracts import Exact, ModelSizes, OpSpec
from ..contracts.batches import POOL
from ..logs import get_logger
from ..plugins import breadcrumb
from ..plugins.forms import verdict_of
from ..plugins.loading import known_contracts
from ..plugins.types import OpImpl
from ..text import quote
from .guarded import bits, rows_of
from .preflight import Form, Provided, Trials, dtypes_of, release, token_counts
from .verification import LayerFactory, as_call, dtype_name, refusal_of, synchronise
from .wanted import parts, promised

if TYPE_CHECKING:
    from ..plugins.registry import Owner, RegistrySnapshot
    from .facts import EngineFacts

__all__ = ["BY_CONTRACT", "NO_ROWS", "Determinism", "determinism_of", "find_variant", "unmeasured"]

log = get_logger("engine")

SECONDS = 2.0
"""How long further token counts are tried, for all implementations of a start together."""

BY_CONTRACT = "its contract leaves no bit open"
"""Why an op that only moves numbers needs no measuring beyond its comparison with the oracle."""

NO_ROWS = (
    "its contract has no results that belong to one row alone, so that nothing shows whether they "
    "depend on the batch"
)

LAX = nullcontext()
"""In the place of a watch where nobody waits."""

Bits = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Determinism:
    """What an implementation was found to be, in one dtype on one device.

    Args:
        runs: whether two calls with the same inputs give the same bits; None where it was not
            measured.
        batches: whether a row gives the same bits in every batch: alone, among others, in another
            place. None where it was not measured.
        reason: the first difference, or why one of the two was not measured; else empty.
    """

    runs: bool | None
    batches: bool | None
    reason: str = ""


def unmeasured(facts: EngineFacts, snapshot: RegistrySnapshot) -> dict[tuple[str, str], str]:
    """(op, impl id) -> why it may not serve, of what nothing measures.

    Empty where the engine does not ask for batch-invariant implementations.

    Args:
        facts: what the engine's configuration says.
        snapshot: what is installed.
    """
    asks, how = facts.wants_invariance, facts.settings.preflight
    found: dict[tuple[str, str], str] = {}
    for op, impls in snapshot.impls_by_op.items() if asks else ():
        spec = snapshot.contracts.get(op)
        for impl in impls:
            why = ""
            if not isinstance(impl, OpImpl):
                why = "it names a class, which is not measured"
            elif spec is not None and _has_no_rows(spec):
                why = NO_ROWS
            elif how != "verify":
                why = f"VLLM_FL_PREFLIGHT={how} measures nothing"
            if why:
                found[op, impl.impl_id] = f"{asks}, and {why}"
    return found


def _has_no_rows(spec: OpSpec) -> bool:
    """Whether no measurement tells if an implementation of the op is batch-invariant.

    Where a row of a result depends on other rows by the contract, another batch is another call.
    What moves numbers has no bits of its own. Where repeated rows change nothing, rows can be
    compared.
    """
    return spec.whole_batch and not (spec.ignores_repeats or _is_exact(spec))


def _is_exact(spec: OpSpec) -> bool:
    return bool(spec.outputs) and all(isinstance(output, Exact) for output in spec.outputs)


def determinism_of(
    impl: OpImpl,
    trials: Trials,
    *,
    call: Callable[..., Any] | None = None,
    layer_for: LayerFactory | None = None,
    counts: Sequence[int] | None = None,
    seconds: float = 0.0,
    watch: breadcrumb.Watchdog | None = None,
) -> Determinism:
    """Call it with the same rows in many batches, and compare the bits of each row.

    It must be right: an exception of its own is passed on.

    Args:
        impl: the implementation.
        trials: the served model's calls of its op.
        call: the implementation as a compiler has it, which is then called with two tokens at
            least: a graph of its own, which one token would have, is not what serves. By default
            the implementation as it is.
        layer_for: as for `as_call`.
        counts: the token counts to try; None takes those of verification at start.
        seconds: how long further ones are tried then, beyond those that always are.
        watch: names in the log what takes long; None where nobody waits.
    """
    spec = trials.spec
    if not trials.forms:
        return Determinism(None, None, "the sizes of its calls are not known")
    measured = _Measured(impl, trials, call or as_call(impl, spec, layer_for), watch)
    by_rows = not spec.whole_batch or spec.ignores_repeats
    with torch.inference_mode():
        served = [form for form in trials.forms if measured.is_served(form)]
        if not served:
            return Determinism(None, None, "it refuses the model's own sizes")
        for form in served:
            if problem := measured.other_run(form):
                return Determinism(False, False if by_rows else None, problem)
        if not by_rows:
            reason = BY_CONTRACT if _is_exact(spec) else NO_ROWS
            return Determinism(True, True if _is_exact(spec) else None, reason)
        least = 1 if call is None else 2
        always, further = (
            [count for count in some if count >= least]
            for some in (
                token_counts(trials.largest, trials.seed) if counts is None else (counts, ())
            )
        )
        deadline = time.monotonic() + seconds
        for number, count in enumerate((*always, *further)):
            if number >= len(always) and time.monotonic() > deadline:
                break
            for form in trials.forms:
                if problem := measured.other_batch(form, count):
                    return Determinism(True, False, problem)
    return Determinism(True, True)


class _Measured:
    """One implementation, and what it gave for each pool of rows, whole and in order."""

    def __init__(
        self,
        impl: OpImpl,
        trials: Trials,
        call: Callable[..., Any],
        watch: breadcrumb.Watchdog | None,
    ) -> None:
        self.impl, self.trials, self.call, self.watch = impl, trials, call, watch
        self._whole: dict[str, Bits | None] = {}
        for form in trials.forms:
            form.switch(large=False)

    def is_served(self, form: Form) -> bool:
        """Whether it takes the pool of this form."""
        return self.whole(form) is not None

    def whole(self, form: Form) -> Bits | None:
        """The bits of every row of the pool, in one batch; None where it refuses that."""
        if form.name not in self._whole:
            self._whole[form.name] = self.bits(form, self._rows)
        return self._whole[form.name]

    @property
    def _rows(self) -> torch.Tensor:
        size = min(POOL, self.trials.largest)
        return torch.arange(size, device=self.trials.device)

    def other_run(self, form: Form) -> str:
        """What differs between two calls of one batch, or nothing."""
        again, whole = self.bits(form, self._rows), self.whole(form)
        if again is not None and whole is not None and not any(map(_differing, again, whole)):
            return ""
        return f"the same call gave other bits ({self._where(form, len(self._rows))})"

    def other_batch(self, form: Form, count: int) -> str:
        """What differs between rows in batches of `count` and those of the pool, or nothing."""
        whole, where = self.whole(form), self._where(form, count)
        size = len(self._rows)
        for salt in range(4 if count <= 4 else 2):
            rows = self.trials.rows(count, salt)
            got = self.bits(form, rows)
            if (got is None) is not (whole is None):
                taken, refused = (count, size) if whole is None else (size, count)
                return f"it takes a batch of {taken} tokens and refuses one of {refused} ({where})"
            if got is None or whole is None:
                return ""
            for mine, base in zip(got, whole, strict=True):
                if mine is None or base is None:
                    continue
                by_row = base.ndim > 0 and len(base) == size
                differing = _differing(mine, base[rows] if by_row else base)
                if differing:
                    has = "1 row has" if differing == 1 else f"{differing} rows have"
                    if not by_row:
                        has = "a number for all rows has"
                    batches = f"in a batch of {count} than in one of {size}"
                    return f"{has} other bits {batches} ({where})"
        return ""

    def bits(self, form: Form, rows: torch.Tensor) -> Bits | None:
        """The bits of the results for these rows of the pool; None where they are refused."""
        spec = self.trials.spec
        laid = form.call(rows_of(form.pool(False), rows))
        form.static.restore(spec.consumed(self.impl.consumes, laid.args))
        line = "Implementation '%s' of op '%s' has been running for %.0f s on one call (%s)"
        where = f"{self._where(form, len(rows))}, whether it gives the same bits"
        names = self.impl.impl_id, self.impl.op_name
        try:
            with self.watch.over(line, *names, breadcrumb.SLOW, where) if self.watch else LAX:
                if verdict_of(self.impl, spec, laid.args) is not True:
                    return None
                got = self.call(*laid.args)
                synchronise(self.trials.device)
        except Exception as error:
            if refusal_of(error):
                return None
            raise
        if spec.whole_batch:
            got = promised(spec, got, laid.args)
        return [None if part is None else _bits(part) for part in parts(got)]

    def _where(self, form: Form, count: int) -> str:
        return f"{count} x {form.name}, {dtype_name(self.trials.dtype)}"


def _bits(result: torch.Tensor) -> torch.Tensor:
    """A copy of the result, as integers."""
    return bits(result.detach().clone(memory_format=torch.contiguous_format))


def _differing(mine: torch.Tensor | None, base: torch.Tensor | None) -> int:
    """In how many rows two results differ."""
    if mine is None or base is None:
        return int(mine is not base)
    if mine.shape != base.shape:
        return max(len(mine), 1) if mine.ndim else 1
    differs = mine != base
    return int((differs.flatten(1).any(1) if differs.ndim > 1 else differs).sum())


def find_variant(
    impls: Iterable[OpImpl],
    dtype: torch.dtype,
    device: torch.device,
    sizes: ModelSizes | None,
    *,
    compiled: Mapping[tuple[str, str], Callable[..., Any]] = MappingProxyType({}),
    backend: str = "inductor",
    layer_for: LayerFactory | None = None,
    seed: int = 0,
    specs: Mapping[str, OpSpec] | None = None,
    seconds: float = SECONDS,
    provided: Mapping[str, Provided] = MappingProxyType({}),
    owners: Mapping[tuple[str, str], Owner] = MappingProxyType({}),
) -> dict[tuple[str, str], str]:
    """(op, impl id) -> why it may not serve where only batch-invariant implementations may.

    Args:
        impls: right implementations of ops that can be measured.
        dtype: the model's dtype.
        device: the worker's device.
        sizes: the model's sizes; None where its configuration does not tell them.
        compiled: (op, impl id) -> the form that a compiler gets, of those that are compiled: it is
            lowered and measured, too.
        backend: what lowers it.
        layer_for: as for `as_call`.
        seed: for the token counts and orders that are drawn.
        specs: the contracts by op; None takes those of the distributions that bring contracts
            and nothing else.
        seconds: how long further token counts are tried, for all implementations together.
        provided: op -> the dtypes of what the model's layers provide (`EngineFacts.provided`).
        owners: (op, impl id) -> who brought it, for the note that is left by a process which a
            kernel ends.
    """
    impls, found = list(impls), {}
    if not impls:
        return {}
    specs = known_contracts().contracts if specs is None else specs
    of_op: dict[str, list[Trials]] = {}
    with breadcrumb.Watchdog(log) as watch:
        for impl in impls:
            key = impl.op_name, impl.impl_id
            spec = specs[impl.op_name]
            if impl.op_name not in of_op:
                kinds = dtypes_of(spec, dtype)
                given = provided.get(impl.op_name, ())
                of_op[impl.op_name] = [
                    Trials(spec, kind, device, sizes, seed, given) for kind in kinds
                ]
            forms: list[tuple[str, Callable[..., Any] | None]] = [("", None)]
            if key in compiled:
                torch._dynamo.reset()
                lowered = torch.compile(
                    compiled[key], fullgraph=True, dynamic=True, backend=backend
                )
                forms.append((f"compiled by {backend}: ", lowered))
            owner = owners[key].name if key in owners else ""
            whose = owner and f" of {owner}"
            what = f"the measuring of {key[0]}={key[1]}{whose}, whether it gives the same bits"
            for trials, (how, call) in product(of_op[impl.op_name], forms):
                try:
                    with breadcrumb.running(what, owner, named=False):
                        told = determinism_of(
                            impl,
                            trials,
                            call=call,
                            layer_for=layer_for,
                            seconds=seconds / len(impls),
                            watch=watch,
                        )
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # a plugin may raise anything, SystemExit included
                    told = Determinism(None, None, f"it raised {quote(error)}")
                if told.batches is not True:
                    is_known = told.batches is False
                    verb = "not batch-invariant" if is_known else "not known to be batch-invariant"
                    found[key] = f"{verb}: {how}{told.reason}"
                    break
    if compiled:
        torch._dynamo.reset()  # vLLM compiles the model afterwards, and finds nothing of this
    of_op.clear()
    release(device)
    return found
