"""Make the bindings of activations, for layers and for operators with an output argument."""

from __future__ import annotations

from typing import Any

from vllm_fl.contracts.binding import Binding, Bound, LayerTarget, OperatorTarget, Route, SizeRule

from ..contracts.rules import INTERMEDIATE
from ._phrases import HW_AGNOSTIC

SHARED = tuple(
    f"vllm.model_executor.layers.activation:{registry}._dict"
    for registry in ("_ACTIVATION_REGISTRY", "_ACTIVATION_AND_MUL_REGISTRY")
)
"""vLLM's registries of activations by name."""


def activation_binding(
    layer: str,
    native: Bound,
    *more_targets: LayerTarget | OperatorTarget,
    not_reached: tuple[str, ...] = (),
    sizes: tuple[SizeRule, ...] = (),
    **more: Any,
) -> Binding:
    """Return the binding of an activation.

    Args:
        layer: the name of vLLM's class, such as `SiluAndMul`.
        native: vLLM's implementation, called with the contract's parameters.
        more_targets: operators of vLLM, and its hardware-agnostic layer.
        not_reached, more: see `Binding`.
        sizes: rules for sizes other than the width of an MLP.
    """
    is_everywhere = any(target.needs_layer for target in more_targets)
    in_tree = LayerTarget(f"vllm.model_executor.layers.activation.{layer}", native)
    return Binding(
        targets=(in_tree, *more_targets),
        sizes=(INTERMEDIATE, *sizes),
        not_reached=not_reached if is_everywhere else (*not_reached, HW_AGNOSTIC),
        shared=SHARED,
        **more,
    )


def activation_operator(
    name: str, *numbers: str, out: str = "out", **constants: Any
) -> OperatorTarget:
    """Return the target for an op f(x, numbers) in vLLM's operator f(out, input, numbers).

    Args:
        name: the operator, such as `_C::silu_and_mul`.
        numbers: the operator's parameters after `input`.
        out: the operator's first parameter.
        constants: values of the contract's parameters that the operator lacks.
    """
    route = Route(args={"x": "input"}, constants=constants, out=out)
    return OperatorTarget(name, (out, "input", *numbers), route, tokens="input")
