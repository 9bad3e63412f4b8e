"""The plan: op -> implementation, as one engine runs with it; layers bind to it when built."""

from __future__ import annotations

import dataclasses
import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from ..contracts import OpSpec
from ..dispatch.context import current_binder
from ..dispatch.guard import Chain, call_guard, method_guard, uncounted
from ..dispatch.record import Record
from ..dispatch.resolver import Stock, Trace
from ..logs import get_logger
from ..plugins.attention import ATTENTION
from ..plugins.communicator import COMMUNICATOR
from ..plugins.types import AttentionImpl, CommunicatorImpl, Impl, LayerImpl, OpImpl
from ..settings.policy import Mode

if TYPE_CHECKING:
    from ..dispatch.manager import OpManager
    from .facts import EngineFacts

__all__ = ["Plan", "PlanEntry", "active_plan", "leave_place", "make_plan", "take_place"]

log = get_logger("engine")


def _before_stock(trace: Trace) -> tuple[Impl, ...]:
    """The candidates before vLLM's own path, in order."""
    before = takewhile(lambda impl: not isinstance(impl, Stock), trace.admitted)
    return cast("tuple[Impl, ...]", tuple(before))


def _callable(impls: Iterable[Impl | Stock]) -> tuple[OpImpl, ...]:
    """Those that can be called: those that neither name a class nor stand for vLLM's own path."""
    return tuple(impl for impl in impls if isinstance(impl, OpImpl))


def _without_layer(trace: Trace) -> tuple[OpImpl, ...]:
    """The candidates before vLLM's own path that can be called by who has no layer."""
    return tuple(impl for impl in _callable(_before_stock(trace)) if not impl.needs_layer)


def _once(impls: Iterable[OpImpl]) -> tuple[OpImpl, ...]:
    found: dict[str, OpImpl] = {}
    for impl in impls:
        found.setdefault(impl.impl_id, impl)
    return tuple(found.values())


@dataclass(frozen=True)
class PlanEntry:
    """What one op runs with.

    Args:
        op: the op's name.
        trace: every candidate with what was decided about it; where size tells, for the largest
            calls.
        note: why vLLM's own path runs against the trace (a setting of vLLM's), or empty.
        rows: (ceiling, trace): the same for calls of at most so many tokens, by ascending
            ceilings, where the op is ordered by size.
    """

    op: str
    trace: Trace
    note: str = ""
    rows: tuple[tuple[int, Trace], ...] = ()

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Those that decide: of the largest calls, then of each row; none under a note."""
        return () if self.note else (self.trace, *(trace for _, trace in self.rows))

    @property
    def candidates(self) -> tuple[Impl, ...]:
        """The candidates before vLLM's own path, in order; of rows, those of the largest calls."""
        return () if self.note else _before_stock(self.trace)

    @property
    def by_row(self) -> tuple[tuple[int, tuple[Impl, ...]], ...]:
        """(ceiling, candidates before vLLM's own path) of each row."""
        return () if self.note else tuple((n, _before_stock(trace)) for n, trace in self.rows)

    @property
    def impls(self) -> tuple[OpImpl, ...]:
        """Every candidate that can be called, of whatever row: those that do not name a class."""
        return _once(i for trace in self.traces for i in _callable(_before_stock(trace)))

    @property
    def firsts(self) -> tuple[OpImpl, ...]:
        """The first choice to be called of the largest calls and of each row, each once."""
        return _once(i for trace in self.traces for i in _callable(_before_stock(trace))[:1])

    @property
    def attention(self) -> tuple[AttentionImpl, ...]:
        """Those of the candidates that are attention backends."""
        return tuple(i for i in self.candidates if isinstance(i, AttentionImpl))

    @property
    def communicators(self) -> tuple[CommunicatorImpl, ...]:
        """Those of the candidates that are communicators."""
        return tuple(i for i in self.candidates if isinstance(i, CommunicatorImpl))

    @property
    def layer(self) -> LayerImpl | None:
        """The class that stands for the whole layer; None where it is vLLM's own."""
        first = next(iter(self.candidates), None)
        return first if isinstance(first, LayerImpl) else None

    @property
    def impl(self) -> OpImpl | None:
        """The first choice to be called; None where the op is left to vLLM, at every size."""
        return self.impls[0] if self.impls else None

    @property
    def label(self) -> str:
        """The implementation's id, or `stock`; by size, as `vendor.cpu(<=16)|stock`."""
        rows = [f"{_label(impls)}(<={ceiling})" for ceiling, impls in self.by_row]
        return "|".join([*rows, _label(self.candidates)])

    @property
    def unmet(self) -> str:
        """Why nothing may run, vLLM's own path included: strict mode and a list of the user's."""
        trace = next((trace for trace in self.traces if not trace.admitted), None)
        if trace is None:
            return ""
        listed = "|".join(map(str, trace.order))
        rejected = "; ".join(f"{i}: {why}" for i, why in trace.rejected)
        return (
            f"strict mode, and nothing that the list of op '{self.op}' names ({listed}) can run: "
            f"{rejected or 'none is installed'}. List what is there, name stock to fall to vLLM's "
            "own code, or unset strict"
        )

    @property
    def reason(self) -> str:
        """Why it was chosen, in a few words; by size, for the largest calls."""
        return self.note or _reason(self.trace)

    @property
    def told(self) -> dict[str, Any]:
        """What runs and why, JSON-able: `impl` and `reason`, and where the op is ordered by size
        `rows`, a list of {up_to, impl, reason} by ascending ceilings."""
        told: dict[str, Any] = {"impl": _label(self.candidates), "reason": self.reason}
        if self.by_row:
            told["rows"] = [
                {"up_to": ceiling, "impl": _label(_before_stock(trace)), "reason": _reason(trace)}
                for ceiling, trace in self.rows
            ]
        return told


def _label(candidates: tuple[Impl, ...]) -> str:
    return candidates[0].impl_id if candidates else "stock"


def _reason(trace: Trace) -> str:
    """Why the first candidate was chosen, in a few words."""
    if not trace.candidates:
        return "no candidate"
    reason = trace.candidates[0].reason
    if _before_stock(trace) or not trace.rejected:
        return reason
    return f"{reason} ({'; '.join(f'{i}: {why}' for i, why in trace.rejected)})"


@dataclass(frozen=True, eq=False)
class Plan:
    """The table op -> implementation of one engine.

    Args:
        mode: how the engine runs the model.
        entries: by op name.
        strict: whether a failure is raised instead of falling to the next candidate.
        counts_calls: whether calls are counted (VLLM_FL_DISPATCH_DEBUG=1).
        record: what was counted while the plan served, and what was demoted at start.
        kept_layers: classes of vLLM's that the user leaves alone, though their op is planned.
        whole: ops that a compiler takes whole, whatever their implementation: passes find them so.
        contracts: every op's contract.
        place: its place among the plans that serve compiled engines of this process, from 1 on
            (`take_place`). Operators of torch are one per process and name; those of two plans
            that serve at once differ by it.
    """

    mode: Mode
    entries: Mapping[str, PlanEntry]
    strict: bool = False
    counts_calls: bool = False
    record: Record = field(default_factory=lambda: Record(log))
    kept_layers: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    contracts: Mapping[str, OpSpec] = field(default_factory=dict)
    place: int = 1
    _bound: dict[Any, tuple[Callable[..., Any], bool]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __deepcopy__(self, memo: object) -> Plan:
        """The plan itself: a copy of a layer serves the same engine."""
        return self

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """(op, impl id) -> calls, where they are counted."""
        return self.record.calls

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        """(op, impl id) -> calls that this later candidate took over."""
        return self.record.fallbacks

    def is_stock(self, op: str) -> bool:
        """Whether the op's layers are left to vLLM, at every size."""
        entry = self.entries.get(op)
        return entry is None or entry.impl is None

    def is_partly_stock(self, op: str) -> bool:
        """Whether the op is left to vLLM at some sizes, and at others not."""
        entry = self.entries[op]
        return bool(entry.by_row) and not all((entry.candidates, *(i for _, i in entry.by_row)))

    def stock_at(self, op: str) -> Callable[[int], bool] | None:
        """Which calls of who has no layer are left to vLLM, by their size.

        Returns:
            The tokens of a call -> whether vLLM's own form is all that `without_layer` would run;
            None where that is so at no size, or at every one.
        """
        entry = self.entries.get(op)
        if entry is None or entry.note:
            return None
        ceilings = [ceiling for ceiling, _ in entry.rows]
        traces = (*(trace for _, trace in entry.rows), entry.trace)
        left = [not _without_layer(trace) for trace in traces]
        if len(set(left)) == 1:
            return None
        return lambda tokens: left[bisect_left(ceilings, tokens)]

    def without_layer(
        self, op: str, grants: frozenset[str] = frozenset(), *, last: OpImpl | None = None
    ) -> Callable[..., Any] | None:
        """The op by the contract's parameters, as somebody who has no layer calls it, uncompiled.

        Args:
            op: the op's name.
            grants: arguments that the caller owns.
            last: vLLM's own form of the op, tried when every candidate refused.

        Returns:
            None where the op is stock, or all of its candidates take the calling layer.
        """
        if not self.callable(op):
            return None
        chain = self.chain(op, grants, last=last, without_layer=True)
        return call_guard(chain, counting=self.record.counting if self.counts_calls else uncounted)

    def callable(self, op: str) -> tuple[OpImpl, ...]:
        """The op's candidates that can be called without a layer; none where it is stock."""
        entry = self.entries.get(op)
        return tuple(impl for impl in entry.impls if not impl.needs_layer) if entry else ()

    @property
    def layers(self) -> dict[str, LayerImpl]:
        """The whole layers that are not vLLM's own: its class name -> the implementation."""
        return {op: impl for op, entry in self.entries.items() if (impl := entry.layer)}

    def chain(
        self,
        op: str,
        grants: frozenset[str] = frozenset(),
        *,
        last: OpImpl | None = None,
        own: OpImpl | None = None,
        without_layer: bool = False,
    ) -> Chain:
        """The op's candidates, with what happens when one refuses a call; by size, in rows.

        Args:
            op: the op's name; it must not be stock.
            grants: arguments that the caller owns.
            last: vLLM's own form of the op, tried when every candidate refused. It is what runs at
                the sizes that are stock.
            own: what runs at those sizes in place of `last`: the code that would run without us.
            without_layer: leave out the candidates that take the calling layer.
        """
        entry = self.entries[op]

        def of(trace: Trace) -> Chain:
            impls = _without_layer(trace) if without_layer else _callable(_before_stock(trace))
            vllms = own or last
            bare = not impls and vllms is not None
            if bare and vllms is not None:
                impls = (vllms,)
            elif not impls:
                impls = self._instead_of_stock(entry, trace, without_layer)
            elif last is not None:
                impls = (*impls, last)
            spec = self.contracts[op]
            return Chain(op, impls, spec, self.strict, self.record, grants, bare=bare)

        rows = () if entry.note else tuple((n, of(trace)) for n, trace in entry.rows)
        return dataclasses.replace(of(entry.trace), rows=rows)

    def _instead_of_stock(
        self, entry: PlanEntry, trace: Trace, without_layer: bool
    ) -> tuple[OpImpl, ...]:
        """What runs at a size that is vLLM's own, in a place that has no form of it to call."""
        next_ones, others = (
            tuple(impl for impl in impls if not (without_layer and impl.needs_layer))
            for impls in (_callable(trace.admitted), entry.impls)
        )
        impls = next_ones or others
        self.record.unfounded(entry.op, impls[0])
        return impls

    def bind(
        self,
        op: str,
        layer: object,
        grants: frozenset[str],
        *,
        last: OpImpl | None = None,
        own: OpImpl | None = None,
        traced: bool = True,
    ) -> Callable[..., Any]:
        """`op` as a method of `layer`: what the layer calls at every step.

        Args:
            op: the op's name; it must not be stock.
            layer: what provides the parameters that the contract takes from a layer.
            grants: arguments that the layer owns.
            last: vLLM's own form of the op, tried when every candidate refused.
            own: the layer's own method, or what leaves a call to it: what runs, uncompiled, at
                sizes that are stock.
            traced: False where no compiler ever sees the calls, whatever the plan's mode is.
        """
        compiled = traced and self.mode == "compiled"
        if compiled or not self.entries[op].by_row:
            own = None
        key = op, grants, compiled, last and last.fn, own and own.fn
        bound = self._bound.get(key)
        if bound is None:
            chain = self.chain(op, grants, last=last, own=own)
            asks_layer = bool(chain.spec and chain.spec.from_layer)
            chains = (chain, *(row for _, row in chain.rows))
            asks_layer |= any(impl.needs_layer for each in chains for impl in each.impls)
            bound = self._guard(chain, asks_layer, compiled), asks_layer
            self._bound[key] = bound
        function, asks_layer = bound
        # A layer that provides nothing is not handed over: an argument less at every call.
        return MethodType(function, layer) if asks_layer else function

    def _guard(
        self, chain: Chain, asks_layer: bool, compiled: bool, *, inlined: bool = False
    ) -> Callable[..., Any]:
        op, first = chain.op, chain.impls[0]
        guard = method_guard if asks_layer else call_guard
        if not compiled:
            return guard(chain, counting=self.counting)
        from .opaque import is_opaque, opaque_op  # torch, which a plan needs for this alone

        # A graph is traced once for all sizes: what differs by them must be looked up inside.
        by_row = self.entries[op].by_row and not inlined
        if by_row or is_opaque(first) or op in self.whole:
            granted = frozenset() if op in self.whole else chain.grants
            first = opaque_op(chain.granting(granted), self.counting, self.place)
        else:
            counting = self.counting(first.fn, op, first.impl_id)
            first = dataclasses.replace(first, fn=counting)
        # Traced code has no second try: no exception reaches it, and Dynamo keeps no branch.
        return guard(dataclasses.replace(chain, impls=(first,), bare=True, rows=()))

    def as_compiled(self, op: str, first: OpImpl, *, inlined: bool = False) -> Callable[..., Any]:
        """The op as a compiled layer's code calls it, by the contract's parameters.

        For verification: it counts nothing, and its operators are those of no engine (place 0).

        Args:
            op: the op's name.
            first: the first choice of the row that is verified; one of the entry's `firsts`.
            inlined: whether the code of a traceable one is inlined, though the op is ordered by
                size, as in graphs that are compiled by range.
        """
        plan = dataclasses.replace(self, counts_calls=False, record=Record(log), place=0)
        rows = (_callable(_before_stock(trace)) for trace in self.entries[op].traces)
        impls = next(impls for impls in rows if impls[:1] == (first,))
        spec = self.contracts[op]
        chain = Chain(op, impls, spec, self.strict, plan.record, spec.consumable)
        return plan._guard(chain, asks_layer=False, compiled=True, inlined=inlined)

    def counting(self, bound: Callable[..., Any], op: str, impl_id: str) -> Callable[..., Any]:
        """`bound`, counted where the user asked for it: its calls, or its tracings when compiled.

        A compiler leaves no call of traced code behind, and an opaque operator is never traced.
        """
        if not self.counts_calls:
            return bound
        return self.record.counting(bound, op, impl_id, traced=self.mode != "eager")

    def line(self, *remarks: str, not_reached: Iterable[str] = ()) -> str:
        """The plan in one line, for the log at start, with what else is worth a word.

        Args:
            remarks: what stands behind the plan.
            not_reached: the planned ops that this engine is not seen to call: they do not count.
        """
        unseen = [op for op in not_reached if op in self.entries]
        planned = " ".join(f"{op}={entry.label}" for op, entry in self.entries.items())
        notes = [f"{op}: {entry.note}" for op, entry in self.entries.items() if entry.note]
        if self.layers:
            notes.append(f"not verified, as whole layers: {' '.join(self.layers)}")
        if unseen:
            notes.append(f"not reached: {', '.join(sorted(unseen))}")
        planned_ops = (op for op, entry in self.entries.items() if entry.candidates or entry.impls)
        count = sum(1 for op in planned_ops if op not in unseen)
        return (
            f"vllm-fl: {count} ops planned: {planned} ({'; '.join([self.mode, *notes, *remarks])})"
        )


def make_plan(
    manager: OpManager,
    facts: EngineFacts,
    *,
    demoted: Mapping[tuple[str, str], str] | None = None,
    notes: Mapping[str, str] | None = None,
    kept_layers: Iterable[str] = (),
) -> Plan:
    """Resolve every contract's op, the attention backend, the communicator and whole layers.

    An op that the model cannot have is left out, unless the user's settings name it. A single rank
    has no communicator.

    Args:
        manager: what is installed.
        facts: what the engine's configuration says.
        demoted: (op, impl id) -> why it is demoted for this engine.
        notes: op -> why it is left to vLLM whatever the policy says.
        kept_layers: classes of vLLM's that the user leaves alone.

    Raises:
        PluginError: an implementation has no contract, and a plugin failed that may have had it.
    """
    demoted, notes = demoted or {}, notes or {}
    entries = {}
    manager.check_contracts()
    snapshot = manager.registry.snapshot()
    specs = snapshot.contracts
    policy = facts.settings.policy
    absent = {op for op in facts.absent if not policy.names(op)}
    largest = facts.sizes.tokens[-1] if facts.sizes else math.inf
    classes = (ATTENTION, COMMUNICATOR) if facts.communicator else (ATTENTION,)
    for op in (*specs, *classes, *snapshot.layers):
        if op in absent:
            continue
        of_op = {impl_id: reason for (name, impl_id), reason in demoted.items() if name == op}
        trace = partial(
            manager.trace,
            op,
            mode=facts.mode,
            engine=True,
            settings=facts.settings,
            demoted=of_op,
            without_layer=facts.mode
            == "compiled",  # an operator in a graph cannot be handed a layer
        )
        ceilings = manager.ceilings(op, mode=facts.mode, settings=facts.settings)
        if facts.wants_invariance:  # two implementations are two sets of bits
            ceilings = ()
        # What stands beyond the largest batch never runs, and must not count as another size.
        last = next((n for n in ceilings if n >= largest), None)
        rows = [(n, trace(tokens=n)) for n in ceilings if last is None or n < last]
        rest = trace(tokens=last)
        entries[op] = PlanEntry(op, rest, notes.get(op, ""), _differing(rows, rest))
    return Plan(
        facts.mode,
        entries,
        strict=facts.settings.policy.strict,
        counts_calls=facts.settings.debug,
        kept_layers=frozenset(kept_layers),
        contracts=specs,
    )


def _differing(rows: Iterable[tuple[int, Trace]], rest: Trace) -> tuple[tuple[int, Trace], ...]:
    """The rows without those that run what the next larger calls do."""

    def runs(trace: Trace) -> object:
        return _before_stock(trace), bool(trace.admitted)

    found: list[tuple[int, Trace]] = []
    following = rest
    for ceiling, trace in reversed([*rows]):
        if runs(trace) != runs(following):
            found.insert(0, (ceiling, trace))
            following = trace
    return tuple(found)


_serving: dict[int, Plan] = {}
_places = threading.Lock()


def take_place(plan: Plan) -> Plan:
    """`plan` in the first place that no plan of another compiled engine of this process has.

    An eager plan needs none, since nothing of it is named in torch.
    """
    if plan.mode == "eager":
        return plan
    with _places:
        place = next(n for n in range(1, len(_serving) + 2) if n not in _serving)
        _serving[place] = plan = dataclasses.replace(plan, place=place)
    return plan


def leave_place(plan: Plan) -> None:
    """The engine of `plan` has ended: the next one may have its place."""
    with _places:
        if _serving.get(plan.place) is plan:
            del _serving[plan.place]


def active_plan() -> Plan | None:
    """The plan of the model that is being built, or None outside an engine."""
    binder = current_binder()
    return binder if isinstance(binder, Plan) else None
