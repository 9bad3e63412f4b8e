"""The plan of an engine: op -> implementation. Layers are bound to it when they are built."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from ..contracts import OpSpec
from ..dispatch.chain import Chain
from ..dispatch.context import current_binder
from ..dispatch.guard import call_guard, method_guard
from ..dispatch.record import Record
from ..dispatch.resolver import FOREIGN, STOCK, Stock, Trace
from ..logs import get_logger
from ..plugins.types import ATTENTION, COMMUNICATOR, KERNEL_OPS, Impl, LayerImpl, OpImpl
from ..settings.policy import Mode, Rows, joined

if TYPE_CHECKING:
    from ..dispatch.manager import OpManager
    from .facts import EngineFacts

Named = TypeVar("Named")

log = get_logger("engine")


def _functions(impls: Iterable[Impl | Stock], *, with_layer: bool = True) -> tuple[OpImpl, ...]:
    called = (impl for impl in impls if isinstance(impl, OpImpl))
    return tuple(impl for impl in called if with_layer or not impl.needs_layer)


def _once(impls: Iterable[OpImpl]) -> tuple[OpImpl, ...]:
    return tuple({impl.impl_id: impl for impl in impls}.values())


@dataclass(frozen=True)
class PlanEntry:
    """The plan of one op. `rows` has all candidates and the decisions about them, by the size of a
    call. `note` is why vLLM's implementation is used regardless of the rows, or empty."""

    op: str
    rows: Rows[Trace]
    note: str = ""

    @property
    def is_foreign(self) -> bool:
        """Whether another vLLM plugin has replaced a layer of the op."""
        return any(each.impl is FOREIGN for each in self.rows[-1][1].candidates)

    @property
    def fallback(self) -> Stock:
        """The fallback after vllm-fl's candidates: the layer of another plugin, or vLLM's
        implementation."""
        stock = (impl for impl in self.rows[-1][1].admitted if isinstance(impl, Stock))
        return FOREIGN if self.note and self.is_foreign else next(stock, STOCK)

    @property
    def candidates(self) -> Rows[tuple[Impl, ...]]:
        """The candidates of vllm-fl by the size of a call; empty if there is a note."""
        if self.note:
            return ((None, ()),)
        return tuple((ceiling, trace.before_stock) for ceiling, trace in self.rows)

    @property
    def is_planned(self) -> bool:
        """Whether the op has a candidate other than `stock`, a function or a class."""
        return any(impls for _, impls in self.candidates)

    @property
    def ceilings(self) -> tuple[int, ...]:
        return tuple(ceiling for ceiling, _ in self.candidates if ceiling is not None)

    @property
    def _largest_first(self) -> tuple[tuple[Impl, ...], ...]:
        *rows, rest = (impls for _, impls in self.candidates)
        return rest, *rows

    @property
    def impls(self) -> tuple[OpImpl, ...]:
        return _once(i for impls in self._largest_first for i in _functions(impls))

    @property
    def firsts(self) -> tuple[OpImpl, ...]:
        return _once(i for impls in self._largest_first for i in _functions(impls)[:1])

    def classes(self, kind: type[Named]) -> tuple[Named, ...]:
        """Return the candidates that are classes of one kind, such as attention backends."""
        return tuple(i for _, impls in self.candidates for i in impls if isinstance(i, kind))

    @property
    def label(self) -> str:
        """The impl id, `foreign` or `stock`. An order by size is shown as
        `vendor.cpu(<=16)|stock`."""
        *rows, (_, rest) = self.candidates
        sized = [f"{self._label(impls)}(<={n})" for n, impls in rows]
        return "|".join([*sized, self._label(rest)])

    def _label(self, candidates: tuple[Impl, ...]) -> str:
        return candidates[0].impl_id if candidates else self.fallback.selector

    @property
    def unmet(self) -> str:
        """Why no candidate can run, or empty. This is possible only in strict mode, if the user's
        order lacks `stock`."""
        trace = next((trace for _, trace in self.rows if not trace.admitted), None)
        if trace is None or self.note:
            return ""
        listed = "|".join(map(str, trace.order))
        rejected = "; ".join(f"{i}: {why}" for i, why in trace.rejected)
        return (
            f"strict mode: no implementation in the order of op '{self.op}' ({listed}) can run: "
            f"{rejected or 'none is installed'}. Add an available one, add stock to fall back to "
            "vLLM's code, or unset strict"
        )

    @property
    def reason(self) -> str:
        """A short reason for the choice. If there are several rows, it is about the largest
        calls."""
        return self.note or _reason(self.rows[-1][1])

    def to_json(self) -> dict[str, Any]:
        """Return `impl` and `reason` for the largest calls. If there are several rows, `rows` has
        {up_to, impl, reason} for each of the others."""
        entry: dict[str, Any] = {"impl": self._label(self.candidates[-1][1]), "reason": self.reason}
        if self.ceilings:
            entry["rows"] = [
                {"up_to": n, "impl": self._label(trace.before_stock), "reason": _reason(trace)}
                for n, trace in self.rows[:-1]
            ]
        return entry


def _reason(trace: Trace) -> str:
    if not trace.candidates:
        return "no candidate"
    reason = trace.candidates[0].reason
    if trace.before_stock or not trace.rejected or trace.selected is FOREIGN:
        return reason
    return f"{reason} ({'; '.join(f'{i}: {why}' for i, why in trace.rejected)})"


@dataclass(frozen=True, eq=False)
class Plan:
    """Op -> implementation for one engine.

    Args:
        strict: whether failures are raised instead of falling back to the next candidate.
        record: counters, and the implementations disabled at startup.
        kept_layers: classes of vLLM that settings exclude, although their op is planned.
        number: the plan's number among the plans of compiled engines in this process
            (`take_number`). Operators have it in their names, because torch allows only one
            operator per name.
    """

    mode: Mode
    entries: Mapping[str, PlanEntry]
    strict: bool = False
    counts_calls: bool = False
    record: Record = field(default_factory=lambda: Record(log))
    kept_layers: frozenset[str] = frozenset()
    contracts: Mapping[str, OpSpec] = field(default_factory=dict)
    number: int = 1
    _bound: dict[Any, tuple[Callable[..., Any], bool]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.counts_calls:
            self.record.counts = "calls" if self.mode == "eager" else "tracings"

    def __deepcopy__(self, memo: object) -> Plan:
        """Return the plan itself, because a copied layer belongs to the same engine."""
        return self

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        return self.record.calls

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return self.record.fallbacks

    def is_stock(self, op: str) -> bool:
        """Whether no function is planned for the op, at any size."""
        entry = self.entries.get(op)
        return entry is None or not entry.impls

    def is_partly_stock(self, op: str) -> bool:
        """Whether the op has planned candidates only at some sizes."""
        entry = self.entries[op]
        return bool(entry.ceilings) and not all(impls for _, impls in entry.candidates)

    def stock_at(self, op: str) -> Callable[[int], bool] | None:
        """Return a function that maps the tokens of a call without a layer to whether vLLM's
        implementation runs. Return None if the size does not matter."""
        entry = self.entries.get(op)
        if entry is None:
            return None
        left = [not _functions(impls, with_layer=False) for _, impls in entry.candidates]
        if len(set(left)) == 1:
            return None
        ceilings = entry.ceilings
        return lambda tokens: left[bisect_left(ceilings, tokens)]

    def without_layer(
        self, op: str, grants: frozenset[str] = frozenset(), *, last: OpImpl | None = None
    ) -> Callable[..., Any] | None:
        """Return the op for uncompiled callers without a layer. The arguments are as for `chain`.
        Returns None if the op is stock, or if all of its candidates need the calling layer."""
        if not self.functions_without_layer(op):
            return None
        return call_guard(self.chain(op, grants, last=last, without_layer=True))

    def functions_without_layer(self, op: str) -> tuple[OpImpl, ...]:
        """Return the op's candidates that can be called without a layer."""
        entry = self.entries.get(op)
        return _functions(entry.impls, with_layer=False) if entry else ()

    @property
    def layers(self) -> dict[str, LayerImpl]:
        """The planned whole layers: vLLM class name -> implementation."""
        return {op: impl for op, e in self.entries.items() for impl in e.classes(LayerImpl)[:1]}

    def chain(
        self,
        op: str,
        grants: frozenset[str] = frozenset(),
        *,
        last: OpImpl | None = None,
        original: OpImpl | None = None,
        without_layer: bool = False,
    ) -> Chain:
        """Return the op's candidates and fallbacks, by the size of a call.

        Args:
            op: the op's name; it must not be stock.
            grants: arguments that the caller owns.
            last: vLLM's implementation, for calls that no candidate supports and for stock sizes.
            original: the layer's original method, which replaces `last` at stock sizes in eager
                mode. If the layer replaces a class of another plugin, `last` and `original` are
                the method of that class.
            without_layer: whether to omit the candidates that need the calling layer.
        """
        entry, with_layer = self.entries[op], not without_layer
        vllms = tuple(impl for impl in (original or last,) if impl is not None)

        def of(trace: Trace) -> tuple[OpImpl, ...]:
            impls = _functions(trace.before_stock, with_layer=with_layer)
            if impls and last is not None:
                return (*impls, last)
            if impls:  # without `last`, the candidates after stock follow
                return _functions(trace.admitted, with_layer=with_layer)
            impls = vllms or _functions(trace.admitted, with_layer=with_layer)
            impls = impls or _functions(entry.impls, with_layer=with_layer)
            if not vllms:
                self.record.unfounded(op, impls[0])
            return impls

        rows = tuple((ceiling, of(trace)) for ceiling, trace in entry.rows)
        return Chain(op, rows, self.contracts[op], self.strict, self.record, grants)

    def bind(
        self,
        op: str,
        layer: object,
        grants: frozenset[str],
        *,
        last: OpImpl | None = None,
        original: OpImpl | None = None,
        traced: bool = True,
    ) -> Callable[..., Any]:
        """Return `op` as a method of `layer`. The layer provides the parameters in `from_layer` of
        the contract. `original` is the layer's original method, or a function that calls it. It
        runs at stock sizes if the layer is not compiled. `traced` is False if no compiler sees the
        calls, in any mode."""
        compiled = traced and self.mode == "compiled"
        if compiled or not self.entries[op].ceilings:
            original = None
        key = op, grants, compiled, last and last.fn, original and original.fn
        bound = self._bound.get(key)
        if bound is None:
            chain = self.chain(op, grants, last=last, original=original)
            asks_layer = bool(chain.spec.from_layer)
            asks_layer |= any(impl.needs_layer for _, impls in chain.rows for impl in impls)
            bound = self._guard(chain, asks_layer, compiled), asks_layer
            self._bound[key] = bound
        function, asks_layer = bound
        # A layer that provides nothing is not passed, which saves an argument in every call.
        return MethodType(function, layer) if asks_layer else function

    def _guard(self, chain: Chain, asks_layer: bool, compiled: bool) -> Callable[..., Any]:
        op, first = chain.op, chain.impls[0]
        guard = method_guard if asks_layer else call_guard
        if not compiled:
            return guard(chain)
        from .opaque import is_opaque, opaque_op

        # A graph is traced once for all sizes, so the operator must select the row.
        if self.entries[op].ceilings or is_opaque(first):
            first = opaque_op(chain, self.number)
        else:
            counting = self.record.counting(first.fn, op, first.impl_id)
            first = dataclasses.replace(first, fn=counting)
        # Traced code has no fallback: it cannot catch an exception, and Dynamo keeps no branch.
        return guard(chain.of(first, bare=True))

    def as_compiled(self, op: str, first: OpImpl) -> Callable[..., Any]:
        """Return the op as compiled code calls it, for verification, without counters. `first` is
        one of the entry's `firsts`; its row is verified."""
        plan = dataclasses.replace(self, counts_calls=False, record=Record(log), number=0)
        rows = (_functions(impls) for _, impls in reversed(self.entries[op].candidates))
        impls = next(impls for impls in rows if impls[:1] == (first,))
        spec = self.contracts[op]
        chain = Chain(op, ((None, impls),), spec, self.strict, plan.record, spec.consumable)
        return plan._guard(chain, asks_layer=False, compiled=True)


def make_plan(
    manager: OpManager,
    facts: EngineFacts,
    *,
    demoted: Mapping[tuple[str, str], str] | None = None,
    notes: Mapping[str, str] | None = None,
    kept_layers: Iterable[str] = (),
) -> Plan:
    """Resolve every op with a contract, the attention backend, the communicator and whole layers.

    Ops that the model cannot have are omitted, unless the user has set an order for the op itself.
    `demoted` maps (op, impl id) to the reason why it must not run in this engine. `notes` maps an
    op to the reason why vLLM's implementation is used regardless of the policy. Raises PluginError
    if a plugin with a contract failed or is missing.
    """
    demoted, notes = demoted or {}, notes or {}
    entries = {}
    snapshot = manager.registry.snapshot()
    specs = snapshot.contracts
    policy = facts.settings.policy
    absent = {op for op in facts.absent if not policy.names(op, itself=True)}
    largest = facts.sizes.tokens[-1] if facts.sizes else math.inf
    classes = (ATTENTION, COMMUNICATOR) if facts.communicator else (ATTENTION,)
    resolver = manager.resolver(
        mode=facts.mode,
        engine=True,
        settings=facts.settings,
        disabled=demoted,
        without_layer=facts.mode == "compiled",
        foreign=facts.foreign,
        facts=facts,
    )
    for op in snapshot.impls_by_op:
        resolver.check_contract(op)
    has_classes = {*facts.kernels, *snapshot.impls_by_op}
    quantised = (op for op in KERNEL_OPS if op in has_classes or policy.names(op, itself=True))
    for op in (*specs, *classes, *quantised, *snapshot.layers):
        if op in absent:
            continue
        traces = resolver.rows(op)
        if facts.wants_invariance:  # two implementations may differ in bits
            traces = traces[-1:]
        reached = [(n, trace) for n, trace in traces if n is not None and n < largest]
        rows = (*reached, (None, traces[len(reached)][1]))
        entries[op] = PlanEntry(op, joined(rows, _run_the_same), notes.get(op, ""))
    return Plan(
        facts.mode,
        entries,
        strict=facts.settings.policy.strict,
        counts_calls=facts.settings.counts_calls,
        kept_layers=frozenset(kept_layers),
        contracts=specs,
    )


def _run_the_same(one: Trace, other: Trace) -> bool:
    return one.before_stock == other.before_stock and bool(one.admitted) == bool(other.admitted)


_numbers: set[int] = set()
_choosing = threading.Lock()


def take_number(plan: Plan) -> Plan:
    """Return a compiled plan with the lowest number that no other plan of this process has. An
    eager plan is returned unchanged."""
    if plan.mode == "eager":
        return plan
    with _choosing:
        number = next(n for n in itertools.count(1) if n not in _numbers)
        _numbers.add(number)
    return dataclasses.replace(plan, number=number)


def release_number(plan: Plan) -> None:
    if plan.mode == "compiled":
        _numbers.discard(plan.number)


def active_plan() -> Plan | None:
    binder = current_binder()
    return binder if isinstance(binder, Plan) else None
