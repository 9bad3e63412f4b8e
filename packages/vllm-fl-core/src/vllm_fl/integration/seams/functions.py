"""Places that we take: Python functions and methods of vLLM's that are neither layer nor operator.

A function is replaced wherever vLLM's modules look it up, once per process for all engines: the
function that stands there finds the plan by who is calling (`serving.plan_now`), as an overridden
operator does. Who has no plan for it gets vLLM's own. A compiler that traces a call traces vLLM's
own function.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...contracts.binding import Binding, FunctionPlace
from ...engine.plan import Plan
from ...logs import get_logger
from ...text import quote
from ..places import stock_form
from ..serving import plan_now
from .arguments import Route, known, leaving, left_to_vllm, misfit
from .lookups import Target, target_of

__all__ = ["Replacements", "choose", "own", "remove", "report", "take"]

log = get_logger("engine")


@dataclass(frozen=True)
class Replacements:
    """What a plan does with the functions that its ops' bindings name.

    Args:
        taken: op -> the places to take.
        left: op -> function -> why vLLM's own stays.
    """

    taken: Mapping[str, tuple[FunctionPlace, ...]]
    left: Mapping[str, Mapping[str, str]]

    @property
    def names(self) -> dict[str, list[str]]:
        """op -> the functions that are replaced, for the digest."""
        return {op: [place.name for place in places] for op, places in self.taken.items()}


def choose(plan: Plan, bindings: Mapping[str, Binding]) -> Replacements:
    """Which functions the engine of `plan` replaces. Changes nothing.

    Args:
        plan: the sealed plan.
        bindings: op -> its places.
    """
    taken: dict[str, tuple[FunctionPlace, ...]] = {}
    left: dict[str, dict[str, str]] = {}
    for op, binding in bindings.items():
        places = [place for place in binding.places if isinstance(place, FunctionPlace)]
        if not places or plan.is_stock(op):
            continue
        if not plan.callable(op):
            why = "its implementations take the calling layer, and a function has none"
            left[op] = {place.name: why for place in places}
            continue
        fitting = []
        for place in places:
            if problem := _misfit(place):
                left.setdefault(op, {})[place.name] = problem
                continue
            fitting.append(place)
        if fitting:
            taken[op] = tuple(fitting)
    return Replacements(taken, left)


def own(place: FunctionPlace) -> Callable[..., Any] | None:
    """The function of a place, as vLLM has it; None where this vLLM has none such."""
    if _misfit(place) or place.name in _replaced:
        return None
    found: Callable[..., Any] = target_of(place.name).function
    return found


def _misfit(place: FunctionPlace) -> str:
    """Why a place is not to be taken in this vLLM, or nothing."""
    if place.name in _replaced:
        return ""  # for another engine of this process, with the same vLLM
    try:
        function = target_of(place.name).function
        parameters = _named(function)
    except Exception as error:
        return f"this vLLM has no such function: {quote(error)}"
    optional = [p.name for p in parameters if p.default is not p.empty]
    return misfit(place, [p.name for p in parameters], optional)


def _named(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that have names, without `*args` and `**kwargs`."""
    taken = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [parameter for parameter in parameters if parameter.kind not in taken]


class _Inside(threading.local):
    """Whether a thread is in a call of the function that the plan answers."""

    active = False


@dataclass(eq=False)
class _Replacement:
    """What stands in the place of one function of vLLM's in this process.

    Args:
        place: the function.
        own: vLLM's.
        targets: where it was.
    """

    place: FunctionPlace
    own: Callable[..., Any]
    targets: tuple[Target, ...]
    routes: dict[Plan | None, Route] = field(default_factory=dict)
    inside: _Inside = field(default_factory=_Inside)
    other_arguments: int = 0
    standing: Callable[..., Any] | None = None

    def install(self) -> None:
        """Put ours wherever vLLM's is looked up."""
        self.standing = self._function()
        for target in self.targets:
            target.put(self.standing)

    def _function(self) -> Callable[..., Any]:
        own, routes, inside = self.own, self.routes, self.inside
        parameters = _named(own)
        names = tuple(parameter.name for parameter in parameters)
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        count = len(self.place.parameters)

        @functools.wraps(own)
        def replaced(*args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return own(*args, **named)
            route = None if inside.active else routes.get(plan_now())
            if route is None or (route.leaves is not None and route.leaves(args, named)):
                return own(*args, **named)
            plain = known(names, count, defaults, args, named)
            if plain is not None:
                inside.active = True
                try:
                    result = route.run(*plain)
                finally:
                    inside.active = False
                if result is not NotImplemented:
                    return result
            self.other_arguments += 1
            return own(*args, **named)

        return replaced

    @property
    def after(self) -> str:
        """Where something else stands in the place of ours; empty if nowhere."""
        return next(
            (
                f"{getattr(target.owner, '__name__', target.owner)}.{target.attribute}"
                for target in self.targets
                if target.now is not self.standing
            ),
            "",
        )


_replaced: dict[str, _Replacement] = {}
"""Function -> what stands in its place, for as long as an engine's plan has it."""

_changing = threading.Lock()


def take(plan: Plan, chosen: Replacements) -> None:
    """Replace the functions that `choose` chose, for calls of the plan's engine."""
    with _changing:
        for op, places in chosen.taken.items():
            for place in places:
                replacement = _replaced.get(place.name)
                if replacement is None:
                    replacement = _replaced[place.name] = _installed(place)
                grants = frozenset(place.grants)
                last = stock_form(op, place.native(replacement.own), grants)
                bound = plan.without_layer(op, grants, last=last)
                assert bound is not None  # `choose` leaves other ops to vLLM
                leaves = leaving(place, plan.stock_at(op))
                replacement.routes[plan] = Route(place.route(bound), leaves)
    for op, left in chosen.left.items():
        for name, why in left.items():
            log.debug("Op '%s': function %s is left to vLLM: %s", op, name, why)


def _installed(place: FunctionPlace) -> _Replacement:
    first = target_of(place.name)
    own = first.function
    targets = [first]
    for path in place.paths[1:]:
        try:
            target = target_of(path)
        except Exception as error:  # a release without this module
            log.debug("Function %s is not looked up at %s: %s", place.name, path, quote(error))
            continue
        if target.function is own:
            targets.append(target)
        else:
            log.warning(
                "Function %s is another one at %s, which somebody has replaced: it is left there",
                place.name,
                path,
            )
    replacement = _Replacement(place, own, tuple(targets))
    replacement.install()
    return replacement


def remove(plan: Plan) -> None:
    """The engine of `plan` has ended: vLLM's functions are back where no other engine needs ours.

    What a module has imported meanwhile, or somebody has wrapped, passes every call on.
    """
    with _changing:
        for name, replacement in list(_replaced.items()):
            if replacement.routes.pop(plan, None) is None or replacement.routes:
                continue
            del _replaced[name]
            for target in replacement.targets:
                if target.now is replacement.standing:
                    target.restore()


def report(plan: Plan, chosen: Replacements) -> dict[str, dict[str, dict[str, Any]]]:
    """op -> function -> what became of it, JSON-able.

    Returns:
        For a function that is replaced: `places`, how many lookups of it are ours;
        `replaced_after_us`, where something else stands now, or None; `other_arguments`, the calls
        that were left to vLLM's function since they are not the op. For one that is left to vLLM:
        `left`, why.
    """
    told = left_to_vllm(chosen.left)
    for op, names in chosen.names.items():
        for name in names:
            replacement = _replaced.get(name)
            if replacement is not None and plan in replacement.routes:
                told.setdefault(op, {})[name] = {
                    "places": len(replacement.targets),
                    "replaced_after_us": replacement.after or None,
                    "other_arguments": replacement.other_arguments,
                }
    return told
