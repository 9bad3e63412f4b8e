"""Where vLLM runs `fatrelu_and_mul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED, gated
from ._models import mentions
from ._phrases import HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, threshold: float = 0.0) -> Tensor:
    from torch.nn.functional import threshold as above

    half = x.shape[-1] // 2
    return above(x[..., :half], threshold, 0.0) * x[..., half:]


BINDING = Binding(
    places=(
        LayerPlace("vllm.model_executor.layers.activation.FatreluAndMul", _native),
        gated("_C::fatrelu_and_mul", ("out", "input", "threshold")),
    ),
    sizes=(INTERMEDIATE,),
    not_reached=(HW_AGNOSTIC,),
    when=mentions("fatrelu"),
    shared=SHARED,
)
