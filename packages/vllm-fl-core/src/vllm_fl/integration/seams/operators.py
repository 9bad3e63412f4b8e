"""Places that we take: the kernels of torch operators of vLLM's.

What calls an operator by name (fused mixtures of experts, models without CustomOp layers) reaches
the planned implementation. A kernel is one per process, operator and dispatch key: there is one
override for all engines, which finds the plan by who is calling (`serving.plan_now`). Who has no
plan for the operator gets the kernel that was there before.

It is a kernel, behind every compiler: calls are guarded as in eager mode, and graphs that a
compiler made, or loaded from its cache, call it like any other.

A vLLM that was built without compiled operators is given those that the plan needs (`empty.py`).
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...contracts import OpSpec
from ...contracts.binding import Binding, Bound, FusionPlace, OperatorPlace
from ...engine.opaque import Watched
from ...engine.plan import Plan
from ...errors import PlaceError
from ...logs import get_logger
from ...plugins.forms import verdict_of
from ...plugins.types import OpImpl
from ..places import places as places_of
from ..places import stock_form
from ..serving import plan_now
from . import empty
from .arguments import Route, known, leaving, left_to_vllm, misfit
from .callers import ShortWay
from .layers import layer_table

__all__ = [
    "Overrides",
    "choose",
    "operator_note",
    "overriders",
    "own",
    "remove",
    "report",
    "take",
]

log = get_logger("engine")


@dataclass(frozen=True)
class Overrides:
    """What a plan does with the operators that its ops' bindings name.

    Args:
        taken: op -> the places to override.
        left: op -> operator -> why vLLM's kernel stays.
        defined: the operators that this vLLM lacks, to be defined while the engine lives.
    """

    taken: Mapping[str, tuple[OperatorPlace, ...]]
    left: Mapping[str, Mapping[str, str]]
    defined: tuple[empty.Definition, ...] = ()

    @property
    def names(self) -> dict[str, list[str]]:
        """op -> the operators that are overridden, for the digest."""
        return {op: [place.name for place in places] for op, places in self.taken.items()}

    @property
    def schemas(self) -> dict[str, str]:
        """Operator -> schema of those that are defined, for the digest and the report."""
        return {definition.name: definition.schema for definition in self.defined}


def operator_note(plan: Plan, op: str) -> str:
    """Why none of a planned op's operators is overridden; empty where they may be.

    vLLM's own layers call these operators: one that the user leaves to vLLM must not get ours
    through them.
    """
    kept = [
        layer.cls for layer in layer_table() if layer.op == op and layer.cls in plan.kept_layers
    ]
    if kept:
        return f"layer {min(kept)} is left to vLLM, and calls its operators"
    if not plan.callable(op):
        return "its implementations take the calling layer, and an operator has none"
    return ""


def choose(
    plan: Plan, bindings: Mapping[str, Binding], device: torch.device, dtype: torch.dtype
) -> Overrides:
    """Which operators the engine of `plan` overrides. Changes nothing.

    Args:
        plan: the sealed plan.
        bindings: op -> its places.
        device: the worker's.
        dtype: the model's.
    """
    taken: dict[str, tuple[OperatorPlace, ...]] = {}
    left: dict[str, dict[str, str]] = {}
    owners: dict[str, str] = {}
    for op, binding in bindings.items():
        places = [place for place in binding.places if isinstance(place, OperatorPlace)]
        if not places or plan.is_stock(op):
            continue
        names = list(dict.fromkeys(place.name for place in places))
        note = operator_note(plan, op)
        if note:
            left[op] = dict.fromkeys(names, note)
            continue
        found, why = _fitting(places, _dispatch_key(device))
        left[op] = why
        own: set[str] = set()
        # What a pass of vLLM's compiler finds may be a call that vLLM's kernel cannot take: there
        # the chain has to be asked.
        by_pass = any(isinstance(place, FusionPlace) for place in binding.places)
        for first in () if by_pass else _firsts(plan, op):
            calls = _calls_of(first, plan.contracts[op], {p.name for p in found}, device, dtype)
            left[op] |= dict.fromkeys(sorted(calls - own), f"{first.impl_id} calls it itself")
            own |= calls
        taken[op] = tuple(place for place in found if place.name not in own)
        for place in taken[op]:
            owners[place.name] = op
    return Overrides(
        {op: places for op, places in taken.items() if places},
        left,
        _to_define(owners, bindings, reads=plan.mode == "compiled"),
    )


def _firsts(plan: Plan, op: str) -> Sequence[OpImpl]:
    """What an operator of the op runs first: of each row, where it is ordered by size."""
    firsts = [impl for impl in plan.entries[op].firsts if not impl.needs_layer]
    return firsts or plan.callable(op)[:1]


def _to_define(
    taken: Mapping[str, str], bindings: Mapping[str, Binding], *, reads: bool
) -> tuple[empty.Definition, ...]:
    """What this vLLM lacks of the operators that are `taken` (operator -> op).

    Args:
        taken: the operators that the plan implements.
        bindings: op -> its places.
        reads: whether vLLM will read operators that it does not call, since it compiles the model.
    """
    ops = {place.name: op for op, place in places_of(bindings, OperatorPlace)} | dict(taken)
    schemas = dict(empty.read_always()) if reads else {}
    schemas |= {name: schema for name in taken if (schema := empty.schema(name))}
    return tuple(
        empty.Definition(name, schema, ops.get(name, ""))
        for name, schema in sorted(schemas.items())
    )


def own(place: OperatorPlace, device: torch.device) -> Callable[..., Any] | None:
    """The operator of a place, as vLLM has it; None where this vLLM has none such."""
    if _schema(place.name) is None or _misfit(place, _dispatch_key(device)):
        return None
    found: Callable[..., Any] = _operator(place.name)
    return found


def _dispatch_key(device: torch.device) -> str:
    """The dispatch key of a device's kernels, as `CPU`."""
    key: str = torch._C._dispatch_key_for_device(device.type)
    return key


def _operator(name: str) -> Any:
    """The operator of this name, its overload included; AttributeError where there is none."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def _schema(name: str) -> Any:
    """The schema of an operator; None where no library has defined it."""
    try:
        return _operator(name)._schema
    except AttributeError:
        return None


def _fitting(
    places: Iterable[OperatorPlace], key: str
) -> tuple[list[OperatorPlace], dict[str, str]]:
    """The places whose operators are there and have the parameters that the binding knows.

    A binding may name an operator more than once, with the parameters that it has in one release
    and in another: the first that fits is taken.

    Returns:
        (places, operator -> why none of its places fits).
    """
    found: dict[str, OperatorPlace] = {}
    why: dict[str, str] = {}
    for place in places:
        if place.name in found:
            continue
        problem = _misfit(place, key)
        if problem:
            why[place.name] = problem
        else:
            found[place.name] = place
            why.pop(place.name, None)
    return list(found.values()), why


def _misfit(place: OperatorPlace, key: str) -> str:
    """Why a place is not to be taken in this vLLM, or nothing."""
    schema = _schema(place.name)
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    if schema is None:
        definable = empty.schema(place.name)
        if not definable:
            return "this vLLM has no such operator"
        schema = torch._C.parse_schema(definable)
    elif not has_kernel(place.name, key):
        return f"this vLLM has no kernel of it for {key}"
    return misfit(place, [a.name for a in schema.arguments], _defaults(schema))


def _defaults(schema: Any) -> dict[str, Any]:
    """The values of the parameters that have some, by name."""
    return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


def _calls_of(
    impl: OpImpl, spec: OpSpec, wanted: set[str], device: torch.device, dtype: torch.dtype
) -> set[str]:
    """Which of the `wanted` operators an implementation calls itself.

    There nothing is to be overridden: the kernel that is there already is what would run, and only
    the way to it would be longer, for vLLM's layers, too.
    """
    watched = Watched(lambda operator: operator.name() in wanted)
    for sample in spec.samples(dtype, device) if wanted else ():
        try:
            if verdict_of(impl, spec, sample.args) is True:
                with watched, torch.inference_mode():
                    impl.fn(*sample.args)
        except Exception as error:  # the preflight has judged it, and its guard will
            log.debug("%s of %s, asked what it calls: %s", impl.impl_id, spec.name, error)
        if {operator.name() for operator, _, _ in watched.calls} == wanted:
            break
    return {operator.name() for operator, _, _ in watched.calls}


class _Inside(threading.local):
    """The call of one operator that a thread is in: with which dispatch keys it came."""

    keyset: Any = None


@dataclass(eq=False)
class _Override:
    """The one override of an operator in this process.

    Args:
        name: the operator.
        key: the dispatch key of its kernel.
        count: how many parameters the binding knows.
        defaults: the values of all parameters that have some, by name.
        parameters: the names of all parameters, in order.
        replaced: the kernel that was there before.
        before: who had registered that, and those beneath it, the active one first.
        beneath: how many of them are for this key.
        callers: where functions of vLLM's are looked up that only call the operator.
    """

    name: str
    key: str
    count: int
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    replaced: Any
    before: tuple[str, ...]
    beneath: int
    callers: tuple[str, ...] = ()
    routes: dict[Plan | None, Route] = field(default_factory=dict)
    inside: _Inside = field(default_factory=_Inside)
    without_engine: int = 0
    other_arguments: int = 0
    library: Any = None
    short_way: ShortWay | None = None

    def install(self, device: torch.device) -> None:
        """Put the override in front of the kernel that is there."""
        kernel = self._kernel()
        namespace, _, operator = self.name.partition("::")
        self.library = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            # torch says so at the first override of a process, and never again.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self.library.impl(operator, kernel, self.key, with_keyset=True, allow_override=True)
        if self.callers:
            self.short_way = ShortWay(
                self.name,
                self.parameters,
                self.callers,
                kernel,
                device.type,
                torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, self.key)),
            )

    def leave_callers(self) -> None:
        """From now on every call comes by torch's dispatcher, which knows who has overridden us."""
        if self.short_way is not None:
            self.short_way.close()

    def _kernel(self) -> Bound:
        """What torch calls. Trailing arguments that equal the schema's defaults are left out."""
        routes, inside, count = self.routes, self.inside, self.count

        def overridden(keyset: Any, *args: Any, **more: Any) -> Any:
            route = routes.get(plan_now())
            if route is None or inside.keyset is not None:
                return self._not_planned(keyset, args, more)
            if route.leaves is not None and route.leaves(args, more):
                return self._call_replaced(keyset, *args, **more)
            plain: Sequence[Any] | None = args
            if more or len(args) != count:
                plain = known(self.parameters, count, self.defaults, args, more)
            if plain is not None:
                inside.keyset = keyset
                try:
                    result = route.run(*plain)
                finally:
                    inside.keyset = None
                if result is not NotImplemented:
                    return result
            self.other_arguments += 1
            return self._call_replaced(keyset, *args, **more)

        return overridden

    def _not_planned(self, keyset: Any, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """A call of nobody's engine, of one that does not plan the op, or from within the op."""
        if self.inside.keyset is None and self.routes and plan_now() is None:
            self.without_engine += 1
        return self._call_replaced(keyset, *args, **more)

    def call(self, *args: Any) -> Any:
        """The replaced kernel, inside a call of the operator: what `stock` means in it."""
        return self._call_replaced(self.inside.keyset, *args)

    def _call_replaced(self, keyset: Any, *args: Any, **more: Any) -> Any:
        try:
            return self.replaced.call_boxed(keyset, *args, **more)
        except RuntimeError as error:
            if "SafeKernelFunction has been invalidated" not in str(error):
                raise
            raise PlaceError(
                f"The kernel of {self.name} that vllm-fl replaced is gone: {self.before[0]}, who "
                "had overridden it first, took its own back while an engine served. It must stay "
                "until that engine is shut down.",
                cause=error,
            ) from error

    @property
    def after(self) -> str:
        """Who has overridden the operator after us; empty if nobody has."""
        now = _registered(self.name, self.key)
        return now[0] if len(now) > self.beneath + 1 else ""


_overrides: dict[tuple[str, str], _Override] = {}
"""(operator, dispatch key) -> its override, for as long as an engine's plan has it."""

_left_behind: list[_Override] = []
"""Overrides that nobody needs any more, but that another one stands on: they pass every call on."""

_changing = threading.Lock()


def _registered(name: str, key: str) -> tuple[str, ...]:
    """Where an operator's kernels for a dispatch key were registered, the active one first."""
    dump: str = torch._C._dispatch_dump(name)
    found = re.findall(rf"^{key}(?: \(inactive\))?: (?:registered at )?(.*?) :: ", dump, re.M)
    return tuple(found)


def take(plan: Plan, chosen: Overrides, device: torch.device) -> None:
    """Define and override the operators that `choose` chose, for calls of the plan's engine."""
    key = _dispatch_key(device)
    with _changing:
        empty.define(plan, chosen.defined)
        for op, places in chosen.taken.items():
            for place in places:
                override = _overrides.get((place.name, key))
                if override is None:
                    override = _overrides[place.name, key] = _installed(place, device)
                override.routes[plan] = _route(plan, op, place, override)
    for op, left in chosen.left.items():
        for name, why in left.items():
            log.debug("Op '%s': operator %s is left to vLLM: %s", op, name, why)


def _installed(place: OperatorPlace, device: torch.device) -> _Override:
    key = _dispatch_key(device)
    for former in list(_left_behind):
        if (former.name, former.key) == (place.name, key) and not former.after:
            former.library._destroy()
            _left_behind.remove(former)
    schema = _schema(place.name)
    before = _registered(place.name, key)
    override = _Override(
        place.name,
        key,
        len(place.parameters),
        tuple(argument.name for argument in schema.arguments),
        _defaults(schema),
        torch.library.get_kernel(place.name, key),
        before or ("an unknown place",),
        len(before),
        place.callers,
    )
    if len(override.before) > 1:
        log.warning(
            "Operator %s had been overridden already, by %s: that is what `stock` means there",
            place.name,
            override.before[0],
        )
    override.install(device)
    return override


def _route(plan: Plan, op: str, place: OperatorPlace, override: _Override) -> Route:
    """The op of `plan`, as a kernel of the operator."""
    grants = frozenset(place.grants)
    bound = plan.without_layer(op, grants, last=stock_form(op, place.native(override.call), grants))
    assert bound is not None  # `choose` leaves other ops to vLLM
    return Route(place.route(bound), leaving(place, plan.stock_at(op)))


def remove(plan: Plan) -> None:
    """The engine of `plan` has ended: vLLM's kernels are back where no other engine needs ours.

    An override that somebody else stands on is left where it is, and passes every call on. What was
    defined and is not needed any more is not there any more.
    """
    with _changing:
        for key, override in list(_overrides.items()):
            if override.routes.pop(plan, None) is None or override.routes:
                continue
            del _overrides[key]
            override.leave_callers()
            after = override.after
            if after:
                _left_behind.append(override)
                log.warning(
                    "Operator %s was overridden after vllm-fl, by %s: vllm-fl's override stays "
                    "beneath it, and passes every call on",
                    override.name,
                    after,
                )
            else:
                override.library._destroy()
        empty.forget(plan, {override.name for override in _left_behind})


def overriders(plan: Plan) -> dict[str, str]:
    """Operator -> who has overridden it after the engine of `plan` did.

    From now on that gets the calls of functions that only call the operator, too.
    """
    found = {}
    for override in list(_overrides.values()):
        if plan in override.routes and (after := override.after):
            override.leave_callers()
            found[override.name] = after
    return found


def report(plan: Plan, chosen: Overrides) -> dict[str, dict[str, dict[str, Any]]]:
    """op -> operator -> what became of it, JSON-able.

    Returns:
        For an operator that is overridden: `replaced`, where the kernel was registered that `stock`
        means there, or None where this vLLM has none; `overridden_by`, who has overridden it after
        us, or None; `callers`, how many lookups of a function of vLLM's that only calls the
        operator find ours; and, counted for all engines of the process, the calls left to that
        kernel: `without_engine`, which no engine of ours made, and `other_arguments`, which are not
        the op, or gave parameters that the binding does not know another value than their default.
        For one that is left to vLLM: `left`, why.
    """
    told = left_to_vllm(chosen.left)
    by_name = {o.name: o for o in list(_overrides.values()) if plan in o.routes}
    for op, names in chosen.names.items():
        for name in names:
            override = by_name.get(name)
            if override is not None:
                told.setdefault(op, {})[name] = {
                    "replaced": None if empty.has_ours(name) else override.before[0],
                    "overridden_by": override.after or None,
                    "callers": override.short_way.places if override.short_way else 0,
                    "without_engine": override.without_engine,
                    "other_arguments": override.other_arguments,
                }
    return told
