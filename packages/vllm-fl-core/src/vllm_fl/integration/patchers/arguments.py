"""A call's arguments for a binding, which may know fewer parameters than this vLLM has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...contracts.binding import FunctionTarget, OperatorTarget


def misfit(
    target: OperatorTarget | FunctionTarget, names: Sequence[str], optional: Collection[str]
) -> str:
    """Return why a target's parameters are not those that its binding knows; empty if they are.

    Args:
        target: the target.
        names: its parameters in this vLLM, in order.
        optional: the parameters that have a default.
    """
    count = len(target.parameters)
    if tuple(names[:count]) != target.parameters:
        return f"its parameters are {', '.join(names)}; known are {', '.join(target.parameters)}"
    required = [name for name in names[count:] if name not in optional]
    return f"it has further parameters without default: {', '.join(required)}" if required else ""


def known(
    parameters: Sequence[str],
    count: int,
    defaults: Mapping[str, Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> list[Any] | None:
    """Return the arguments for the parameters that a binding knows; None for a call that is vLLM's.

    Such a call gives another parameter another value than its default, or does not fit the
    function: vLLM raises its own error for it.

    Args:
        parameters: the names of all parameters, in order.
        count: how many of them the binding knows, from the first on.
        defaults: the values of the optional parameters.
        args, named: what the call gave by position and by name.
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
