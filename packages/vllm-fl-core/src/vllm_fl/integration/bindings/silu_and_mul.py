"""Where vLLM runs `silu_and_mul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...contracts.binding import Binding, LayerPlace
from ...contracts.sizes import INTERMEDIATE
from ._phrases import HW_AGNOSTIC, MOE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    from vllm.model_executor.layers.activation import SiluAndMul

    result: Tensor = SiluAndMul.forward_native(x)
    return result


BINDING = Binding(
    places=(LayerPlace("vllm.model_executor.layers.activation.SiluAndMul", _native),),
    sizes=(INTERMEDIATE,),
    not_reached=(
        MOE,
        "quantised models: vLLM's passes and kernels that fuse activation and quantisation take "
        "both",
        HW_AGNOSTIC,
    ),
)
