"""Where vLLM runs `silu_and_mul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import LayerTarget

from ._activation import activation, gated
from ._experts import SHARED_INTERMEDIATE
from ._phrases import EXPERTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    from vllm.model_executor.layers.activation import SiluAndMul

    result: Tensor = SiluAndMul.forward_native(x)
    return result


BINDING = activation(
    "SiluAndMul",
    _native,
    # What mixtures of experts call: the parameters of vLLM's CUDA build, and of its CPU one.
    gated("_C::silu_and_mul", ("result", "input")),
    gated("_C::silu_and_mul", ("out", "input")),
    LayerTarget("vllm.model_executor.hw_agnostic.layers.activation.SiluAndMul", _native),
    sizes=(SHARED_INTERMEDIATE,),
    not_reached=(
        EXPERTS,
        "quantised models: vLLM's passes and kernels that fuse activation and quantisation take "
        "both",
    ),
    needs=("vllm.model_executor.layers.activation:SiluAndMul.forward_native",),
)
