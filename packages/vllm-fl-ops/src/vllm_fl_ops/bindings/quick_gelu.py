"""Where vLLM runs `quick_gelu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED, elementwise
from ._models import is_multimodal, mentions
from ._phrases import HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


BINDING = Binding(
    places=(
        LayerPlace("vllm.model_executor.layers.activation.QuickGELU", _native),
        elementwise("_C::gelu_quick"),
    ),
    sizes=(INTERMEDIATE,),
    not_reached=(HW_AGNOSTIC,),
    when=lambda config: is_multimodal(config) or mentions("quick_gelu")(config),
    shared=SHARED,
)
