"""Where vLLM runs `relu2`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation, elementwise
from ._models import is_multimodal, mentions
from ._phrases import EXPERTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor) -> Tensor:
    return x.relu().square()


BINDING = activation(
    "ReLUSquaredActivation",
    _native,
    elementwise("_C::relu_squared"),
    not_reached=(
        EXPERTS,
        "experts without a gate, whose activation vLLM computes by two of PyTorch's operators",
        "quantised models: vLLM's kernel that fuses activation and quantisation takes both",
    ),
    when=lambda config: is_multimodal(config) or mentions("relu2")(config),
)
