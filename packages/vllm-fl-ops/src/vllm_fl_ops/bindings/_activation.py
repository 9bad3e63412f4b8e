"""Operators that leave an activation of `input` in a tensor of the caller's."""

from __future__ import annotations

from typing import Any

from vllm_fl.contracts.binding import OperatorPlace, Route

__all__ = ["SHARED", "elementwise", "gated"]

SHARED = tuple(
    f"vllm.model_executor.layers.activation:{registry}._dict"
    for registry in ("_ACTIVATION_REGISTRY", "_ACTIVATION_AND_MUL_REGISTRY")
)
"""Where vLLM keeps activations by their names."""


def elementwise(name: str) -> OperatorPlace:
    """The place of an op (x) in an operator (out, input), whose tensors are of one shape.

    Args:
        name: the operator, as `_C::gelu_new`.
    """
    return gated(name, ("out", "input"))


def gated(name: str, parameters: tuple[str, ...], **constants: Any) -> OperatorPlace:
    """The place of an op (x, numbers) in an operator (out, input, numbers).

    Args:
        name: the operator, as `_C::silu_and_mul`.
        parameters: the operator's.
        constants: what the operator stands for of the contract's parameters.
    """
    route = Route(args={"x": "input"}, constants=constants, out=parameters[0])
    return OperatorPlace(name, parameters, route, tokens="input")
