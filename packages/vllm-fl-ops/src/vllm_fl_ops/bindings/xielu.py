"""Where vLLM runs `xielu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED
from ._models import mentions
from ._phrases import HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    from torch import expm1, min, where
    from torch.nn.functional import softplus

    positive, negative = softplus(alpha_p), beta + softplus(alpha_n)
    return where(
        x > 0,
        positive * x * x + beta * x,
        (expm1(min(x, eps)) - x) * negative + beta * x,
    )


BINDING = Binding(
    places=(LayerPlace("vllm.model_executor.layers.activation.XIELU", _native),),
    sizes=(INTERMEDIATE,),
    not_reached=(HW_AGNOSTIC,),
    when=mentions("xielu"),
    shared=SHARED,
)
