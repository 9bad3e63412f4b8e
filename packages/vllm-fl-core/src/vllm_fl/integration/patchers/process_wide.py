"""The base for targets that exist once per process: kernels of operators, and functions.

A replacement uses the plan of the calling engine (`engines.calling_engine`). The replaced code runs
in three cases: the caller has no plan for the target, the call does not compute the op, or an
implementation makes the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...contracts.binding import Binding, Bound, FunctionTarget, OperatorTarget
from ...engine.plan import Plan
from ...logs import get_logger
from ..engines import Engine, calling_engine
from ..patcher import Patcher
from ..targets import installed_bindings, stock_form

if TYPE_CHECKING:
    import torch

Taken = OperatorTarget | FunctionTarget

SelectsStock = Callable[[Sequence[Any], Mapping[str, Any]], bool]
"""(arguments by position, by name) -> whether the plan selects stock for the call's size."""

log = get_logger("engine")


@dataclass(frozen=True)
class Choice:
    """The operators or functions that an engine replaces.

    Args:
        left: op -> target -> why it is not replaced.
        defined: operator -> schema, for operators to define in a vLLM without compiled operators.
    """

    taken: Mapping[str, tuple[Taken, ...]]
    left: Mapping[str, Mapping[str, str]]
    defined: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, list[str]]:
        return {op: [target.name for target in targets] for op, targets in self.taken.items()}


class _Inside(threading.local):
    """The argument `how` of the call that the thread is answering. It is None outside such
    calls."""

    how: Any = None


@dataclass(eq=False)
class Replacement:
    """The replacement of one target in this process.

    Args:
        parameters: the names of all parameters of the target, in order.

    Attributes:
        answers: engine with a plan for the target -> (the op with the target's parameters, a
            predicate for calls with a size at which the op is stock).
    """

    target: Taken
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    answers: dict[Engine, tuple[Bound, SelectsStock | None]] = field(default_factory=dict)
    without_engine: int = 0
    other_arguments: int = 0
    inside: _Inside = field(default_factory=_Inside)

    def replaced(self, how: Any, *args: Any, **named: Any) -> Any:
        """Call the replaced code. `how` is the first argument of the function that `answering`
        returns."""
        raise NotImplementedError

    def remove(self) -> bool:
        """Restore the replaced code, unless other code needs the replacement. Return whether it was
        restored."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the entry in the worker report."""
        raise NotImplementedError

    def native(self, *args: Any, **named: Any) -> Any:
        """Run the replaced code inside a call of the target. It is the `stock` implementation."""
        return self.replaced(self.inside.how, *args, **named)

    def known(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any] | None:
        """Return the arguments for the parameters of the binding, or None to run the replaced code.
        The replaced code runs if another parameter differs from its default. If the call does not
        fit the signature, it raises the error."""
        parameters, defaults, count = self.parameters, self.defaults, len(self.target.parameters)
        if len(args) > len(parameters) or not named.keys() <= set(parameters):
            return None  # arguments for *args or **kwargs
        by_position = dict(zip(parameters, args, strict=False))
        given = {**defaults, **by_position, **named}
        if len(given) < len(parameters) or (named and not named.keys().isdisjoint(by_position)):
            return None  # an argument is missing or passed twice
        for name in parameters[count:]:
            value, default = given[name], defaults[name]
            if value is not default and (type(value) is not type(default) or value != default):
                return None
        return [given[name] for name in parameters[:count]]

    def answering(self) -> Callable[..., Any]:
        """Return the function that runs instead of the target, with the arguments of `replaced`.
        Arguments after the parameters of the binding are dropped if they equal their defaults."""
        inside, replaced, count = self.inside, self.replaced, len(self.target.parameters)
        answers = self.answers

        def answered(how: Any, *args: Any, **named: Any) -> Any:
            if inside.how is not None:
                return replaced(how, *args, **named)
            engine = calling_engine()
            answer = None if engine is None else answers.get(engine)
            if answer is None:
                self.without_engine += engine is None
                return replaced(how, *args, **named)
            run, selects_stock = answer
            if selects_stock is not None and selects_stock(args, named):
                return replaced(how, *args, **named)
            plain: Any = args
            if named or len(args) != count:
                plain = self.known(args, named)
            if plain is not None:
                inside.how = how
                try:
                    result = run(*plain)
                finally:
                    inside.how = None
                if result is not NotImplemented:
                    return result
            self.other_arguments += 1
            return replaced(how, *args, **named)

        return answered


def mismatch(target: Taken, names: Sequence[str], optional: Collection[str]) -> str:
    """Return why a target's parameters do not match its binding, or empty."""
    count = len(target.parameters)
    if tuple(names[:count]) != target.parameters:
        return f"its parameters are {', '.join(names)}; expected: {', '.join(target.parameters)}"
    required = [name for name in names[count:] if name not in optional]
    return f"it has further parameters without default: {', '.join(required)}" if required else ""


_replacements: dict[str, Replacement] = {}
"""Target -> its replacement, as long as an engine or other code depends on it."""

_changing = threading.Lock()


def replacement_of(name: str) -> Replacement | None:
    return _replacements.get(name)


def replacements_of(engine: Engine) -> list[Replacement]:
    return [each for each in [*_replacements.values()] if engine in each.answers]


class Taking(Patcher):
    """The base of the patchers of process-wide targets. `key` is the key in the digest and in the
    report."""

    key: str

    def note(self, plan: Plan, op: str) -> str:
        """Return why no target of a planned op may be replaced, or empty."""
        raise NotImplementedError

    def misfit(self, target: Any, device: torch.device) -> str:
        """Return why a target cannot be replaced in this vLLM, or empty."""
        raise NotImplementedError

    def install(self, target: Any, device: torch.device) -> Replacement:
        """Replace a target for the first engine."""
        raise NotImplementedError

    def choice(
        self,
        plan: Plan,
        bindings: Mapping[str, Binding],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> Choice:
        """Choose the targets in these bindings to replace for a plan. A binding may list a target
        several times, with the parameters of different releases. The first target that matches is
        used."""
        assert self.kind is not None
        taken: dict[str, tuple[Taken, ...]] = {}
        left: dict[str, dict[str, str]] = {}
        for op, binding in bindings.items():
            targets: list[Any] = [t for t in binding.targets if isinstance(t, self.kind)]
            if not targets or plan.is_stock(op):
                continue
            note = self.note(plan, op)
            found: dict[str, Taken] = {}
            problems: dict[str, str] = {}
            for target in targets:
                why = note or self.misfit(target, device)
                if why:
                    problems.setdefault(target.name, why)
                else:
                    found.setdefault(target.name, target)
            if found:
                taken[op] = tuple(found.values())
            if others := {name: why for name, why in problems.items() if name not in found}:
                left[op] = others
        return Choice(taken, left)

    def take(self, engine: Engine, chosen: Choice) -> None:
        """Replace the chosen targets for calls of this engine, until its plan is unbound."""
        plan = engine.plan
        for op, targets in chosen.taken.items():
            for target in targets:
                with _changing:
                    ours = _replacements.get(target.name)
                    if ours is None:
                        ours = self.install(target, engine.device)
                        _replacements[target.name] = ours
                    grants = frozenset(target.grants)
                    last = stock_form(op, target.native(ours.native), grants)
                    bound = plan.without_layer(op, grants, last=last)
                    assert bound is not None
                    selects_stock = _stock_selector(target, plan.stock_at(op))
                    ours.answers[engine] = target.route(bound), selects_stock
                engine.on_unbind(_give_back, engine, ours)
        for op, left in chosen.left.items():
            for name, why in left.items():
                log.debug("Op '%s': %s is not replaced: %s", op, name, why)

    def report_targets(
        self, engine: Engine, chosen: Choice
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Return op -> target -> {`left`: reason} or `Replacement.to_json()`."""
        found: dict[str, dict[str, dict[str, Any]]] = {
            op: {name: {"left": why} for name, why in left.items()}
            for op, left in chosen.left.items()
        }
        ours = {each.target.name: each for each in replacements_of(engine)}
        for op, names in chosen.names.items():
            # Another thread may unbind the plan during a report.
            found.setdefault(op, {}).update({n: ours[n].to_json() for n in names if n in ours})
        return found

    def choose(self, engine: Engine) -> dict[str, Any]:
        chosen = self.choice(engine.plan, installed_bindings(), engine.device, engine.facts.dtype)
        engine.state[type(self)] = chosen
        return {self.key: chosen.names}

    def apply(self, engine: Engine) -> None:
        self.take(engine, engine.state[type(self)])

    def report(self, engine: Engine) -> dict[str, Any]:
        return {self.key: self.report_targets(engine, engine.state[type(self)])}


def _give_back(engine: Engine, ours: Replacement) -> None:
    with _changing:
        del ours.answers[engine]
        if not ours.answers and ours.remove():
            del _replacements[ours.target.name]


def _stock_selector(target: Taken, is_stock: Callable[[int], bool] | None) -> SelectsStock | None:
    """Return a predicate for calls with a size at which the op is stock, or None if the size does
    not matter. `is_stock` is from `Plan.stock_at`."""
    if is_stock is None or not target.tokens:
        return None
    name, position = target.tokens, target.parameters.index(target.tokens)

    def selects_stock(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        try:
            tokens = (args[position] if position < len(args) else named[name]).shape[0]
        except (AttributeError, IndexError, KeyError):  # if it is not a tensor, the route raises
            return False
        return is_stock(tokens)

    return selects_stock
