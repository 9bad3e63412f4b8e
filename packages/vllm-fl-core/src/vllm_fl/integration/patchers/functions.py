"""Targets that we take: Python functions and methods of vLLM's that are neither layer nor operator.

A function is replaced wherever vLLM's modules look it up, once per process for all engines
(`taking.py`). A compiler that traces a call traces vLLM's own function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...contracts.binding import Binding, FunctionTarget
from ...engine.plan import Plan
from ...logs import get_logger
from ...plugins.types import OpImpl
from ...text import quote
from ..engines import Engine
from ..patcher import Patcher
from ..targets import installed_bindings
from . import taking
from .arguments import misfit
from .lookups import lookup_of
from .taking import Choice

log = get_logger("engine")


def choose(plan: Plan, bindings: Mapping[str, Binding]) -> Choice:
    """Which functions the engine of `plan` replaces. Changes nothing.

    Args:
        plan: the sealed plan.
        bindings: op -> its targets.
    """

    def note(op: str) -> str:
        why = "its implementations take the calling layer, and a function has none"
        return "" if plan.callable(op) else why

    return taking.choose(plan, bindings, FunctionTarget, note, _misfit)


def _misfit(target: FunctionTarget) -> str:
    """Why a target is not to be taken in this vLLM, or nothing."""
    if taking.standing_at(target.name) is not None:
        return ""  # for another engine of this process, with the same vLLM
    try:
        function = lookup_of(target.name).function
        parameters = _named(function)
    except Exception as error:
        return f"this vLLM has no such function: {quote(error)}"
    optional = [p.name for p in parameters if p.default is not p.empty]
    return misfit(target, [p.name for p in parameters], optional)


def _named(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that have names, without `*args` and `**kwargs`."""
    taken = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [parameter for parameter in parameters if parameter.kind not in taken]


class _Replacement(taking.Stand[FunctionTarget]):
    """What stands in the place of one function of vLLM's in this process, wherever that is looked
    up.

    Attributes:
        own: vLLM's.
        lookups: where it was.
    """

    def __init__(self, target: FunctionTarget) -> None:
        first = lookup_of(target.name)
        own = self.own = first.function
        self.lookups = [first]
        for path in target.paths[1:]:
            try:
                lookup = lookup_of(path)
            except Exception as error:  # a release without this module
                log.debug("Function %s is not looked up at %s: %s", target.name, path, quote(error))
                continue
            if lookup.function is own:
                self.lookups.append(lookup)
            else:
                log.warning(
                    "Function %s is another one at %s, which somebody has replaced: it is left "
                    "there",
                    target.name,
                    path,
                )
        parameters = _named(own)
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        super().__init__(target, tuple(parameter.name for parameter in parameters), defaults)
        answered = self.answering()

        @functools.wraps(own)
        def function(*args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return own(*args, **named)
            return answered(True, *args, **named)

        self.function = function
        for lookup in self.lookups:
            lookup.put(function)

    def replaced(self, how: Any, *args: Any, **named: Any) -> Any:
        """vLLM's own function."""
        return self.own(*args, **named)

    def remove(self) -> None:
        """Put vLLM's back. What a module has imported, or somebody has wrapped, passes calls on."""
        for lookup in self.lookups:
            if lookup.now is self.function:
                lookup.restore()

    def told(self) -> dict[str, Any]:
        """What a report says of it.

        Returns:
            `places`, how many lookups of it are ours; `replaced_after_us`, where something else
            stands now, or None; `other_arguments`, the calls that were left to vLLM's function
            since they are not the op.
        """
        others = (lookup for lookup in self.lookups if lookup.now is not self.function)
        after = (f"{getattr(o.owner, '__name__', o.owner)}.{o.attribute}" for o in others)
        return {
            "places": len(self.lookups),
            "replaced_after_us": next(after, None),
            "other_arguments": self.other_arguments,
        }


def take(engine: Engine, chosen: Choice) -> None:
    """Replace the chosen functions until the engine leaves."""
    taking.take(engine, chosen, _Replacement)


class Functions(Patcher):
    """Replaces Python functions and methods of vLLM's."""

    kind = FunctionTarget

    def choose(self, engine: Engine) -> dict[str, Any]:
        chosen = engine.state[Functions] = choose(engine.plan, installed_bindings())
        return {"functions": chosen.names}

    def apply(self, engine: Engine) -> None:
        take(engine, engine.state[Functions])

    def own_form(self, op: str, target: FunctionTarget, device: torch.device) -> OpImpl | None:
        own = None
        if not _misfit(target) and taking.standing_at(target.name) is None:
            own = lookup_of(target.name).function
        return taking.form_of(op, target, own)

    def report(self, engine: Engine) -> dict[str, Any]:
        return {"functions": taking.report(engine, engine.state[Functions])}
