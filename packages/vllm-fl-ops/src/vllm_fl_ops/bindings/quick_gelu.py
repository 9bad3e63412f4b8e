"""Where vLLM runs `quick_gelu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation, elementwise
from ._models import is_multimodal, mentions

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


BINDING = activation(
    "QuickGELU",
    _native,
    elementwise("_C::gelu_quick"),
    when=lambda config: is_multimodal(config) or mentions("quick_gelu")(config),
)
