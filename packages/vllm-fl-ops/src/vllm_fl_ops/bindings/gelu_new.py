"""Where vLLM runs `gelu_new`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED, elementwise
from ._models import is_multimodal, mentions
from ._phrases import GELU_TANH, HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    from torch import pow, tanh

    c = math.sqrt(2.0 / math.pi)
    return 0.5 * x * (1.0 + tanh(c * (x + 0.044715 * pow(x, 3.0))))


BINDING = Binding(
    places=(
        LayerPlace("vllm.model_executor.layers.activation.NewGELU", _native),
        elementwise("_C::gelu_new"),
    ),
    sizes=(INTERMEDIATE,),
    not_reached=(GELU_TANH, HW_AGNOSTIC),
    when=lambda config: is_multimodal(config) or mentions("gelu_new")(config),
    shared=SHARED,
)
