"""silu_and_mul as an operator: mixture of experts calls it, and models without CustomOps."""

from __future__ import annotations

from ....contracts.binding import OperatorPlace
from ._gated import native, route

__all__ = ["OPERATORS"]

OPERATORS = (
    # vLLM's CUDA build, and its CPU one.
    OperatorPlace("_C::silu_and_mul", ("result", "input"), route(), native()),
    OperatorPlace("_C::silu_and_mul", ("out", "input"), route(), native()),
)
