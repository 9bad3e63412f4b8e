"""Replace Python functions and methods of vLLM, except layers and operators.

A function is replaced in every module of vLLM that looks it up. It is replaced once per process,
for all engines (`process_wide.py`). If a compiler traces a call, it traces vLLM's function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...contracts.binding import FunctionTarget
from ...engine.plan import Plan
from ...logs import get_logger
from ...text import quote
from .lookups import lookup_of
from .process_wide import Replacement, Taking, mismatch, replacement_of

log = get_logger("engine")


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    taken = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    all_of = inspect.signature(function).parameters.values()
    found = [parameter for parameter in all_of if parameter.kind not in taken]
    defaults = {p.name: p.default for p in found if p.default is not p.empty}
    return tuple(parameter.name for parameter in found), defaults


class _Function(Replacement):
    def __init__(self, target: FunctionTarget) -> None:
        first = lookup_of(target.name)
        original = self.original = first.function
        self.lookups = [first]
        for path in target.paths[1:]:
            try:
                lookup = lookup_of(path)
            except Exception as error:  # a release without this module
                log.debug("Function %s is not looked up at %s: %s", target.name, path, quote(error))
                continue
            if lookup.function is original:
                self.lookups.append(lookup)
            else:
                log.warning(
                    "Function %s is already replaced at %s by other code, which stays",
                    target.name,
                    path,
                )
        super().__init__(target, *_parameters(original))
        answered = self.answering()

        @functools.wraps(original)
        def function(*args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **named)
            return answered(True, *args, **named)

        self.function = function
        for lookup in self.lookups:
            lookup.put(function)

    def replaced(self, how: Any, *args: Any, **named: Any) -> Any:
        return self.original(*args, **named)

    def remove(self) -> bool:
        """Restore vLLM's function. References to the replacement that remain pass calls to vLLM's
        function."""
        for lookup in self.lookups:
            if lookup.current is self.function:
                lookup.restore()
        return True

    def to_json(self) -> dict[str, Any]:
        """Return the function's entry in the worker report. `places` is the number of replaced
        lookups. `replaced_after_us` is a lookup that other code has replaced since, or None.
        `other_arguments` is the number of calls that do not compute the op."""
        others = (lookup for lookup in self.lookups if lookup.current is not self.function)
        after = (f"{getattr(o.owner, '__name__', o.owner)}.{o.attribute}" for o in others)
        return {
            "places": len(self.lookups),
            "replaced_after_us": next(after, None),
            "other_arguments": self.other_arguments,
        }


class Functions(Taking):
    kind = FunctionTarget
    key = "functions"

    def note(self, plan: Plan, op: str) -> str:
        why = "its implementations need the calling layer, which functions do not have"
        return "" if plan.functions_without_layer(op) else why

    def misfit(self, target: FunctionTarget, device: torch.device) -> str:
        if replacement_of(target.name) is not None:
            return ""  # already replaced for another engine
        try:
            parameters = _parameters(lookup_of(target.name).function)
        except Exception as error:
            return f"this vLLM has no such function: {quote(error)}"
        return mismatch(target, *parameters)

    def install(self, target: FunctionTarget, device: torch.device) -> Replacement:
        return _Function(target)
