"""Where vLLM runs `mul_and_silu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation, gated
from ._models import is_multimodal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    from torch.nn.functional import silu

    half = x.shape[-1] // 2
    return x[..., :half] * silu(x[..., half:])


BINDING = activation(
    "MulAndSilu",
    _native,
    gated("_C::mul_and_silu", ("out", "input")),
    when=is_multimodal,  # Molmo, Ultravox, Cohere's and Aya's vision models
)
