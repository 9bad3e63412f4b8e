"""The operators of each op, until its binding has them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from ....contracts.binding import Binding, LayerPlace

__all__ = ["bindings"]

OPS = ("gelu_and_mul", "rms_norm", "rotary_embedding", "silu_and_mul")


def bindings() -> Mapping[str, Binding]:
    """Op -> its operators, and the layers that call them."""
    from ...seams.layers import layer_table

    return {
        op: Binding(
            (
                *(LayerPlace(f"vllm.{layer.cls}") for layer in layer_table() if layer.op == op),
                *import_module(f"{__name__}.{op}").OPERATORS,
            )
        )
        for op in OPS
    }
