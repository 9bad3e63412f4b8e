"""Where vLLM runs `gelu_and_mul_sparse`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation
from ._models import mentions

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


BINDING = activation(
    "GeluAndMulSparse",
    _native,
    when=mentions("activation_sparsity"),  # Gemma 3n
)
