"""What contracts of several families have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypedDict

__all__ = ["OfLayer", "not_finite", "of_layer"]


class OfLayer(TypedDict):
    """Fields of an `OpSpec`."""

    from_layer: Mapping[str, Callable[[Any], Any]]
    layer: Callable[..., object]


def of_layer(*same: str, **other: str) -> OfLayer:
    """How a layer provides parameters, and such a layer.

    Args:
        same: parameters that are attributes of the layer.
        other: parameter -> the attribute, as `weight.data`.
    """
    attributes = {**dict(zip(same, same, strict=True)), **other}

    def layer(**given: Any) -> object:
        return SimpleNamespace(
            **{attributes[name].partition(".")[0]: value for name, value in given.items()}
        )

    return {"from_layer": {n: _reader(a) for n, a in attributes.items()}, "layer": layer}


def _reader(attribute: str) -> Callable[[Any], Any]:
    """A function that PyTorch's compiler can trace, which it cannot do with an `attrgetter`."""
    first, _, second = attribute.partition(".")
    if second:
        return lambda layer: getattr(getattr(layer, first), second)
    return lambda layer: getattr(layer, first)


def not_finite(*names: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Bad inputs of numbers that implementations look at before they compute."""
    for name in names:
        yield from ((f"{name}: {value}", {name: value}) for value in (math.nan, math.inf))
