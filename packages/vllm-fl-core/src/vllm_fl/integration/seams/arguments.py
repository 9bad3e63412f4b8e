"""A call's arguments as a binding knows them, which may know fewer parameters than the release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["known"]


def known(
    parameters: Sequence[str],
    count: int,
    defaults: Mapping[str, Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> list[Any] | None:
    """The arguments for the parameters that a binding knows; None if others were given a meaning.

    Args:
        parameters: the names of all parameters, in order.
        count: how many of them the binding knows, from the first on.
        defaults: the values of those that have a default, by name.
        args: what the call gave by position.
        named: what it gave by name.
    """
    if len(args) > len(parameters) or not named.keys() <= set(parameters):
        return None  # something for its *args or **kwargs
    given = {**defaults, **dict(zip(parameters, args, strict=False)), **named}
    for name in parameters[count:]:
        value, default = given[name], defaults[name]
        if value is not default and (type(value) is not type(default) or value != default):
            return None
    return [given[name] for name in parameters[:count]]
