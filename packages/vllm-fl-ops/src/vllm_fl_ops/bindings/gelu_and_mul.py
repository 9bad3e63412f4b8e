"""Where vLLM runs `gelu_and_mul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED, gated
from ._phrases import EXPERTS, HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, approximate: str = "none") -> Tensor:
    from torch.nn.functional import gelu

    half = x.shape[-1] // 2
    return gelu(x[..., :half], approximate=approximate) * x[..., half:]


BINDING = Binding(
    places=(
        LayerPlace("vllm.model_executor.layers.activation.GeluAndMul", _native),
        gated("_C::gelu_and_mul", ("out", "input"), approximate="none"),
        gated("_C::gelu_tanh_and_mul", ("out", "input"), approximate="tanh"),
    ),
    sizes=(INTERMEDIATE,),
    not_reached=(EXPERTS, HW_AGNOSTIC),
    shared=SHARED,
)
