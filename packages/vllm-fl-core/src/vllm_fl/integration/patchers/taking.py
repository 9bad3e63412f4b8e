"""Targets that a process has once for all its engines: kernels of torch operators, functions.

What stands in such a target for an engine's plan finds the engine by who is calling
(`engines.now`). Who has no plan for it gets what stood there before. So do calls that are not the
op, and those that an implementation makes itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ...contracts.binding import Binding, FunctionTarget, OperatorTarget
from ...engine.plan import Plan
from ...logs import get_logger
from ...plugins.types import OpImpl
from ..engines import Engine, now
from ..targets import stock_form
from .arguments import Answer, known, leaving
from .empty import Definition

P = TypeVar("P", OperatorTarget, FunctionTarget)

log = get_logger("engine")


@dataclass(frozen=True)
class Choice:
    """What a plan does with the operators, or with the functions, that its ops' bindings name.

    Args:
        taken: op -> the targets to take.
        left: op -> target -> why what stands there stays.
        defined: the operators that this vLLM lacks, to be defined while the engine lives.
    """

    taken: Mapping[str, tuple[OperatorTarget | FunctionTarget, ...]]
    left: Mapping[str, Mapping[str, str]]
    defined: tuple[Definition, ...] = ()

    @property
    def names(self) -> dict[str, list[str]]:
        """op -> the targets that are taken, for the digest."""
        return {op: [target.name for target in targets] for op, targets in self.taken.items()}

    @property
    def schemas(self) -> dict[str, str]:
        """Operator -> schema of those that are defined, for the digest and the report."""
        return {definition.name: definition.schema for definition in self.defined}


class _Inside(threading.local):
    """How the call of a target that a thread is in has come; None where it is in none."""

    how: Any = None


@dataclass(eq=False)
class Stand(Generic[P]):
    """What stands in one target of this process.

    Args:
        target: the target.
        parameters: the names of all its parameters, in order.
        defaults: the values of those that have some, by name.

    Attributes:
        answers: how the plan of each engine that needs it answers calls.
    """

    target: P
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    answers: dict[Engine, Answer] = field(default_factory=dict)
    without_engine: int = 0
    other_arguments: int = 0
    inside: _Inside = field(default_factory=_Inside)

    def replaced(self, how: Any, *args: Any, **named: Any) -> Any:
        """What stood there before; `how` is what tells it of the way by which a call came."""
        raise NotImplementedError

    def remove(self) -> None:
        """Put that back: no engine needs what stands there."""
        raise NotImplementedError

    def told(self) -> dict[str, Any]:
        """What a report says of it, JSON-able."""
        raise NotImplementedError

    def native(self, *args: Any, **named: Any) -> Any:
        """What stood there before, inside a call of the target: what `stock` means in it."""
        return self.replaced(self.inside.how, *args, **named)

    def answering(self) -> Callable[..., Any]:
        """What is called in the place's stead, as `replaced` is.

        Trailing arguments that equal their parameters' defaults are left out.
        """
        inside, replaced, count = self.inside, self.replaced, len(self.target.parameters)
        answers = self.answers

        def answered(how: Any, *args: Any, **named: Any) -> Any:
            if inside.how is not None:
                return replaced(how, *args, **named)
            engine = now()
            answer = None if engine is None else answers.get(engine)
            if answer is None:
                self.without_engine += engine is None
                return replaced(how, *args, **named)
            if answer.leaves is not None and answer.leaves(args, named):
                return replaced(how, *args, **named)
            plain: Any = args
            if named or len(args) != count:
                plain = known(self.parameters, count, self.defaults, args, named)
            if plain is not None:
                inside.how = how
                try:
                    result = answer.run(*plain)
                finally:
                    inside.how = None
                if result is not NotImplemented:
                    return result
            self.other_arguments += 1
            return replaced(how, *args, **named)

        return answered


_standing: dict[tuple[str, str], Stand[Any]] = {}
"""(target, dispatch key or nothing) -> what stands there, for as long as an engine needs it."""

_changing = threading.Lock()


def standing_at(name: str, key: str = "") -> Stand[Any] | None:
    """What stands in the place of this name; None where no engine has taken it."""
    return _standing.get((name, key))


def stands_of(engine: Engine) -> list[Stand[Any]]:
    """What stands in targets of this process for an engine."""
    return [stand for stand in [*_standing.values()] if engine in stand.answers]


def choose(
    plan: Plan,
    bindings: Mapping[str, Binding],
    kind: type[P],
    note: Callable[[str], str],
    misfit: Callable[[P], str],
) -> Choice:
    """Which targets of one kind the engine of `plan` takes. Changes nothing.

    Args:
        plan: the plan.
        bindings: op -> its targets.
        kind: the kind of target.
        note: op -> why none of its targets is taken, or nothing.
        misfit: a target -> why it is not to be taken in this vLLM, or nothing.
    """
    taken: dict[str, tuple[P, ...]] = {}
    left: dict[str, dict[str, str]] = {}
    for op, binding in bindings.items():
        targets = [target for target in binding.targets if isinstance(target, kind)]
        if not targets or plan.is_stock(op):
            continue
        why = note(op)
        found, problems = fitting(() if why else targets, misfit)
        if why:
            problems = dict.fromkeys((target.name for target in targets), why)
        if found:
            taken[op] = tuple(found)
        if problems:
            left[op] = problems
    return Choice(taken, left)


def form_of(op: str, target: P, own: Callable[..., Any] | None) -> OpImpl | None:
    """vLLM's own form of an op, which no compiler looks into.

    Args:
        op: the op.
        target: its target.
        own: what vLLM has there, or None.
    """
    if own is None or target.within:
        return None
    return stock_form(op, target.native(own), frozenset(target.grants), traceable=False)


def fitting(targets: Iterable[P], misfit: Callable[[P], str]) -> tuple[list[P], dict[str, str]]:
    """(the targets that are to be taken, by name why none of a target's forms is).

    A binding may name a target more than once, with the parameters that it has in one release and
    in another: the first that fits is taken.
    """
    found: dict[str, P] = {}
    problems: dict[str, str] = {}
    for target in targets:
        if target.name in found:
            continue
        problem = misfit(target)
        if problem:
            problems[target.name] = problem
        else:
            found[target.name] = target
            problems.pop(target.name, None)
    return list(found.values()), problems


def take(
    engine: Engine, chosen: Choice, install: Callable[[Any], Stand[Any]], key: str = ""
) -> None:
    """Take the targets that `choose` chose, for calls of this engine, until it leaves.

    Args:
        engine: the engine.
        chosen: what it takes.
        install: puts something into a target in which nothing of ours stands.
        key: the dispatch key, of operators.
    """
    plan = engine.plan
    for op, targets in chosen.taken.items():
        for target in targets:
            with _changing:
                stand = _standing.get((target.name, key))
                if stand is None:
                    stand = _standing[target.name, key] = install(target)
                grants = frozenset(target.grants)
                last = stock_form(op, target.native(stand.native), grants)
                bound = plan.without_layer(op, grants, last=last)
                assert bound is not None  # `choose` leaves other ops to vLLM
                leaves = leaving(target, plan.stock_at(op))
                stand.answers[engine] = Answer(target.route(bound), leaves)
            engine.on_unbind(_give_back, engine, stand, key)
    for op, left in chosen.left.items():
        for name, why in left.items():
            log.debug("Op '%s': %s is left to vLLM: %s", op, name, why)


def _give_back(engine: Engine, stand: Stand[Any], key: str) -> None:
    """An engine has ended: what was there before is back where no other engine needs ours."""
    with _changing:
        del stand.answers[engine]
        if not stand.answers:
            del _standing[stand.target.name, key]
            stand.remove()


def report(engine: Engine, chosen: Choice) -> dict[str, dict[str, dict[str, Any]]]:
    """op -> operator or function -> what became of it, JSON-able.

    Returns:
        For one that is left to vLLM `left`, why; for the others what `Stand.told` says. Calls are
        counted for all engines of the process.
    """
    told: dict[str, dict[str, dict[str, Any]]] = {
        op: {name: {"left": why} for name, why in left.items()}
        for op, left in chosen.left.items()
        if left
    }
    stands = {stand.target.name: stand for stand in stands_of(engine)}
    for op, names in chosen.names.items():
        # A thread may ask while the plan is unbound.
        told.setdefault(op, {}).update({n: stands[n].told() for n in names if n in stands})
    return told
