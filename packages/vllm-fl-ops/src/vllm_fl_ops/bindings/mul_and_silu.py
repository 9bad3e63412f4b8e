"""Where vLLM runs `mul_and_silu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED, gated
from ._models import is_multimodal
from ._phrases import HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    from torch.nn.functional import silu

    half = x.shape[-1] // 2
    return x[..., :half] * silu(x[..., half:])


BINDING = Binding(
    places=(
        LayerPlace("vllm.model_executor.layers.activation.MulAndSilu", _native),
        gated("_C::mul_and_silu", ("out", "input")),
    ),
    sizes=(INTERMEDIATE,),
    not_reached=(HW_AGNOSTIC,),
    when=is_multimodal,  # Molmo, Ultravox, Cohere's and Aya's vision models
    shared=SHARED,
)
