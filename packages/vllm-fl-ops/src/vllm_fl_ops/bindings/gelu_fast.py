"""Where vLLM runs `gelu_fast`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation, elementwise
from ._models import is_multimodal, mentions
from ._phrases import GELU_TANH

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    from torch import tanh

    return 0.5 * x * (1.0 + tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


BINDING = activation(
    "FastGELU",
    _native,
    elementwise("_C::gelu_fast"),
    not_reached=(GELU_TANH,),
    when=lambda config: is_multimodal(config) or mentions("gelu_fast")(config),
)
