"""A call's arguments as a binding knows them, which may know fewer parameters than the release."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...contracts.binding import Bound, FunctionTarget, OperatorTarget

Leaves = Callable[[Sequence[Any], Mapping[str, Any]], bool]
"""(what a call gave by position, what by name) -> whether the plan leaves it to vLLM."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How one plan answers the calls of a target.

    Args:
        run: the op, by the parameters that the binding knows.
        leaves: asked before anything is made of a call's arguments; None where the plan leaves no
            size to vLLM, or the target does not tell a call's.
    """

    run: Bound
    leaves: Leaves | None


def misfit(
    target: OperatorTarget | FunctionTarget, names: Sequence[str], optional: Collection[str]
) -> str:
    """Why the parameters of a target are not those that its binding knows, or nothing.

    Args:
        target: the target.
        names: its parameters in this vLLM, in order.
        optional: those of them that have a default.
    """
    count = len(target.parameters)
    if tuple(names[:count]) != target.parameters:
        return f"its parameters are {', '.join(names)}; known are {', '.join(target.parameters)}"
    required = [name for name in names[count:] if name not in optional]
    return f"it has further parameters without default: {', '.join(required)}" if required else ""


def leaving(
    target: OperatorTarget | FunctionTarget, is_stock: Callable[[int], bool] | None
) -> Leaves | None:
    """Which calls of a target are left to vLLM on account of their size.

    Args:
        target: the target.
        is_stock: what `Plan.stock_at` gave for its op.
    """
    if is_stock is None or not target.tokens:
        return None
    name, position = target.tokens, target.parameters.index(target.tokens)

    def leaves(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        try:
            tokens = (args[position] if position < len(args) else named[name]).shape[0]
        except (AttributeError, IndexError, KeyError):  # no tensor: the route says what is wrong
            return False
        return is_stock(tokens)

    return leaves


def known(
    parameters: Sequence[str],
    count: int,
    defaults: Mapping[str, Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> list[Any] | None:
    """The arguments for the parameters that a binding knows; None for a call that is vLLM's.

    That is one in which other parameters were given a meaning, or which is none of the function's:
    vLLM raises its own error for it.

    Args:
        parameters: the names of all parameters, in order.
        count: how many of them the binding knows, from the first on.
        defaults: the values of those that have a default, by name.
        args: what the call gave by position.
        named: what it gave by name.
    """
    if len(args) > len(parameters) or not named.keys() <= set(parameters):
        return None  # something for its *args or **kwargs
    by_position = dict(zip(parameters, args, strict=False))
    given = {**defaults, **by_position, **named}
    if len(given) < len(parameters) or (named and not named.keys().isdisjoint(by_position)):
        return None  # something is missing, or given twice
    for name in parameters[count:]:
        value, default = given[name], defaults[name]
        if value is not default and (type(value) is not type(default) or value != default):
            return None
    return [given[name] for name in parameters[:count]]
