"""gelu_and_mul as an operator, one for each approximation."""

from __future__ import annotations

from ....contracts.binding import OperatorPlace
from ._gated import native, route

__all__ = ["OPERATORS"]

OPERATORS = tuple(
    OperatorPlace(
        name, ("out", "input"), route(approximate=approximate), native(approximate=approximate)
    )
    for name, approximate in (("_C::gelu_and_mul", "none"), ("_C::gelu_tanh_and_mul", "tanh"))
)
