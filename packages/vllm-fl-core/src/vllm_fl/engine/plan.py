"""The plan: op -> implementation, as one engine runs with it; layers bind to it when built."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

from ..contracts import OpSpec, contracts
from ..dispatch.context import current_binder
from ..dispatch.guard import Chain, call_guard, method_guard
from ..dispatch.record import Record
from ..dispatch.resolver import Stock, Trace
from ..logs import get_logger
from ..plugins.attention import ATTENTION
from ..plugins.types import AttentionImpl, Impl, LayerImpl, OpImpl
from ..settings.policy import Mode

if TYPE_CHECKING:
    from ..dispatch.manager import OpManager
    from .facts import EngineFacts

__all__ = ["Plan", "PlanEntry", "active_plan", "leave_place", "make_plan", "take_place"]

log = get_logger("engine")


@dataclass(frozen=True)
class PlanEntry:
    """What one op runs with.

    Args:
        op: the op's name.
        trace: every candidate with what was decided about it.
        note: why vLLM's own path runs against the trace (a setting of vLLM's), or empty.
    """

    op: str
    trace: Trace
    note: str = ""

    @property
    def candidates(self) -> tuple[Impl, ...]:
        """The candidates before vLLM's own path, in order."""
        found: list[Impl] = []
        for impl in () if self.note else self.trace.admitted:
            if isinstance(impl, Stock):
                break
            found.append(impl)
        return tuple(found)

    @property
    def impls(self) -> tuple[OpImpl, ...]:
        """Those of the candidates that can be called: those that do not name a class."""
        return tuple(i for i in self.candidates if isinstance(i, OpImpl))

    @property
    def attention(self) -> tuple[AttentionImpl, ...]:
        """Those of the candidates that are attention backends."""
        return tuple(i for i in self.candidates if isinstance(i, AttentionImpl))

    @property
    def layer(self) -> LayerImpl | None:
        """The class that stands for the whole layer; None where it is vLLM's own."""
        first = next(iter(self.candidates), None)
        return first if isinstance(first, LayerImpl) else None

    @property
    def impl(self) -> OpImpl | None:
        """The first choice to be called; None where the op is left to vLLM."""
        return self.impls[0] if self.impls else None

    @property
    def label(self) -> str:
        """The implementation's id, or `stock`."""
        return self.candidates[0].impl_id if self.candidates else "stock"

    @property
    def unmet(self) -> str:
        """Why nothing may run, vLLM's own path included: strict mode and a list of the user's."""
        if self.note or self.trace.admitted:
            return ""
        listed = "|".join(map(str, self.trace.order))
        rejected = "; ".join(f"{i}: {why}" for i, why in self.trace.rejected)
        return (
            f"strict mode, and nothing that the list of op '{self.op}' names ({listed}) can run: "
            f"{rejected or 'none is installed'}. List what is there, name stock to fall to vLLM's "
            "own code, or unset strict"
        )

    @property
    def reason(self) -> str:
        """Why it was chosen, in a few words."""
        if self.note:
            return self.note
        if not self.trace.candidates:
            return "no candidate"
        reason = self.trace.candidates[0].reason
        if self.candidates or not self.trace.rejected:
            return reason
        return f"{reason} ({'; '.join(f'{i}: {why}' for i, why in self.trace.rejected)})"


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
    contracts: Mapping[str, OpSpec] = field(default_factory=contracts)
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
        """Whether the op's layers are left to vLLM."""
        entry = self.entries.get(op)
        return entry is None or entry.impl is None

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
        chain = self.chain(op, grants, last=last)
        impls = tuple(impl for impl in chain.impls if not impl.needs_layer)
        bound = call_guard(dataclasses.replace(chain, impls=impls))
        return self.record.counting(bound, op, impls[0].impl_id) if self.counts_calls else bound

    def callable(self, op: str) -> tuple[OpImpl, ...]:
        """The op's candidates that can be called without a layer; none where it is stock."""
        entry = self.entries.get(op)
        return tuple(impl for impl in entry.impls if not impl.needs_layer) if entry else ()

    @property
    def layers(self) -> dict[str, LayerImpl]:
        """The whole layers that are not vLLM's own: its class name -> the implementation."""
        chosen = {op: entry.layer for op, entry in self.entries.items()}
        return {op: impl for op, impl in chosen.items() if impl is not None}

    def chain(
        self,
        op: str,
        grants: frozenset[str] = frozenset(),
        *,
        first: OpImpl | None = None,
        last: OpImpl | None = None,
    ) -> Chain:
        """The op's candidates, with what happens when one refuses a call.

        Args:
            op: the op's name; it must not be stock.
            grants: arguments that the caller owns.
            first: the candidate to begin with, where something else has passed over those before.
            last: vLLM's own form of the op, tried when every candidate refused.
        """
        impls = self.entries[op].impls
        impls = (*impls[impls.index(first) if first else 0 :], *((last,) if last else ()))
        return Chain(op, impls, self.contracts[op], self.strict, self.record, grants)

    def bind(
        self,
        op: str,
        layer: object,
        grants: frozenset[str],
        *,
        last: OpImpl | None = None,
        traced: bool = True,
    ) -> Callable[..., Any]:
        """`op` as a method of `layer`: what the layer calls at every step.

        Args:
            op: the op's name; it must not be stock.
            layer: what provides the parameters that the contract takes from a layer.
            grants: arguments that the layer owns.
            last: vLLM's own form of the op, tried when every candidate refused.
            traced: False where no compiler ever sees the calls, whatever the plan's mode is.
        """
        compiled = traced and self.mode == "compiled"
        key = op, grants, compiled, last and last.fn
        bound = self._bound.get(key)
        if bound is None:
            chain = self.chain(op, grants, last=last)
            asks_layer = bool(chain.spec and chain.spec.from_layer)
            asks_layer |= any(impl.needs_layer for impl in chain.impls)
            bound = self._guard(chain, asks_layer, compiled), asks_layer
            self._bound[key] = bound
        function, asks_layer = bound
        # A layer that provides nothing is not handed over: an argument less at every call.
        return MethodType(function, layer) if asks_layer else function

    def _guard(self, chain: Chain, asks_layer: bool, compiled: bool) -> Callable[..., Any]:
        op, first = chain.op, chain.impls[0]
        guard = method_guard if asks_layer else call_guard
        if not compiled:
            return self.counting(guard(chain), op, first.impl_id)
        from .opaque import is_opaque, opaque_op  # torch, which a plan needs for this alone

        if is_opaque(first):
            first = opaque_op(chain, self.counting, self.place)
        else:
            counting = self.counting(first.fn, op, first.impl_id)
            first = dataclasses.replace(first, fn=counting)
        # Traced code has no second try: no exception reaches it, and Dynamo keeps no branch.
        return guard(dataclasses.replace(chain, impls=(first,)), bare=True)

    def as_compiled(self, op: str) -> Callable[..., Any]:
        """The op as a compiled layer's code calls it, by the contract's parameters.

        For verification: it counts nothing, and its operators are those of no engine (place 0).
        """
        plan = dataclasses.replace(self, counts_calls=False, record=Record(log), place=0)
        chain = plan.chain(op, plan.contracts[op].consumable)
        return plan._guard(chain, asks_layer=False, compiled=True)

    def counting(self, bound: Callable[..., Any], op: str, impl_id: str) -> Callable[..., Any]:
        """`bound`, counted where the user asked for it: its calls, or its tracings when compiled.

        A compiler leaves no call of traced code behind, and an opaque operator is never traced.
        """
        if not self.counts_calls:
            return bound
        return self.record.counting(bound, op, impl_id, traced=self.mode != "eager")

    def line(self, *remarks: str) -> str:
        """The plan in one line, for the log at start, with what else is worth a word."""
        planned = " ".join(f"{op}={entry.label}" for op, entry in self.entries.items())
        notes = [f"{op}: {entry.note}" for op, entry in self.entries.items() if entry.note]
        if self.layers:
            notes.append(f"not verified, as whole layers: {' '.join(self.layers)}")
        count = sum(1 for entry in self.entries.values() if entry.candidates)
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
    """Resolve every contract's op, the attention backend and whole layers, for an engine.

    An op that the model cannot have is left out, unless the user's settings name it.

    Args:
        manager: what is installed.
        facts: what the engine's configuration says.
        demoted: (op, impl id) -> why it is demoted for this engine.
        notes: op -> why it is left to vLLM whatever the policy says.
        kept_layers: classes of vLLM's that the user leaves alone.
    """
    demoted, notes = demoted or {}, notes or {}
    entries = {}
    snapshot = manager.registry.snapshot()
    specs = snapshot.contracts
    policy = facts.settings.policy
    absent = {op for op in facts.absent if not policy.names(op)}
    for op in (*specs, ATTENTION, *snapshot.layers):
        if op in absent:
            continue
        of_op = {impl_id: reason for (name, impl_id), reason in demoted.items() if name == op}
        trace = manager.trace(
            op,
            mode=facts.mode,
            engine=True,
            settings=facts.settings,
            demoted=of_op,
            without_layer=facts.mode
            == "compiled",  # an operator in a graph cannot be handed a layer
        )
        entries[op] = PlanEntry(op, trace, notes.get(op, ""))
    return Plan(
        facts.mode,
        entries,
        strict=facts.settings.policy.strict,
        counts_calls=facts.settings.debug,
        kept_layers=frozenset(kept_layers),
        contracts=specs,
    )


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
