"""Where vLLM runs `gelu_and_mul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation, gated
from ._phrases import EXPERTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, approximate: str = "none") -> Tensor:
    from torch.nn.functional import gelu

    half = x.shape[-1] // 2
    return gelu(x[..., :half], approximate=approximate) * x[..., half:]


BINDING = activation(
    "GeluAndMul",
    _native,
    gated("_C::gelu_and_mul", ("out", "input"), approximate="none"),
    gated("_C::gelu_tanh_and_mul", ("out", "input"), approximate="tanh"),
    not_reached=(EXPERTS,),
)
