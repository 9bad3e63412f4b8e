"""Where vLLM runs `relu2`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED, elementwise
from ._models import is_multimodal, mentions
from ._phrases import EXPERTS, HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    return x.relu().square()


BINDING = Binding(
    places=(
        LayerPlace("vllm.model_executor.layers.activation.ReLUSquaredActivation", _native),
        elementwise("_C::relu_squared"),
    ),
    sizes=(INTERMEDIATE,),
    not_reached=(
        EXPERTS,
        "experts without a gate, whose activation vLLM computes by two of PyTorch's operators",
        "quantised models: vLLM's kernel that fuses activation and quantisation takes both",
        HW_AGNOSTIC,
    ),
    when=lambda config: is_multimodal(config) or mentions("relu2")(config),
    shared=SHARED,
)
