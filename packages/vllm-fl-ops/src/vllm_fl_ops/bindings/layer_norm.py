"""Binding of `layer_norm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerTarget

from ..contracts.rules import EPSILON, HIDDEN

if TYPE_CHECKING:
    from torch import Tensor


def _native(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Compute in the wider of the dtypes of x and weight, like vLLM's layer."""
    import torch

    wide = x if weight is None else x.to(torch.promote_types(x.dtype, weight.dtype))
    normed = torch.nn.functional.layer_norm(wide, x.shape[-1:], weight, bias, epsilon)
    return normed.to(x.dtype)


BINDING = Binding(
    targets=(LayerTarget("vllm.model_executor.layers.layernorm.LayerNorm", _native),),
    sizes=(HIDDEN, EPSILON),
    not_reached=(
        "`LayerNorm` of vLLM 0.26 and 0.27, where it is not a `CustomOp`",
        "models that call `torch.nn.LayerNorm`, such as many vision encoders, and layer norms "
        "defined by a model (Cohere's)",
    ),
)
