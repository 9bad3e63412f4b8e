"""Where vLLM runs `gelu_new`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ._activation import activation, elementwise
from ._models import is_multimodal, mentions
from ._phrases import GELU_TANH

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    from torch import pow, tanh

    c = math.sqrt(2.0 / math.pi)
    return 0.5 * x * (1.0 + tanh(c * (x + 0.044715 * pow(x, 3.0))))


BINDING = activation(
    "NewGELU",
    _native,
    elementwise("_C::gelu_new"),
    not_reached=(GELU_TANH,),
    when=lambda config: is_multimodal(config) or mentions("gelu_new")(config),
)
