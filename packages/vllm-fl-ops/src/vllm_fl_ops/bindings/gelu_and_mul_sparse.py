"""Where vLLM runs `gelu_and_mul_sparse`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED
from ._models import mentions
from ._phrases import HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, std_multiplier: float, approximate: str = "none") -> Tensor:
    from torch import mean, std
    from torch.nn.functional import gelu, relu

    half = x.shape[-1] // 2
    gate = x[..., :half]
    cutoff = mean(gate, dim=-1, keepdim=True)
    cutoff = cutoff + std(gate, dim=-1, keepdim=True, unbiased=False) * std_multiplier
    return gelu(relu(gate - cutoff), approximate=approximate) * x[..., half:]


BINDING = Binding(
    places=(LayerPlace("vllm.model_executor.layers.activation.GeluAndMulSparse", _native),),
    sizes=(INTERMEDIATE,),
    not_reached=(HW_AGNOSTIC,),
    when=mentions("activation_sparsity"),  # Gemma 3n
    shared=SHARED,
)
