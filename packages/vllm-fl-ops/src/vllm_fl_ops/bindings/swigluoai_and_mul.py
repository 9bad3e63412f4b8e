"""Where vLLM runs `swigluoai_and_mul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation, gated
from ._models import has_experts
from ._phrases import EXPERTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate = x[..., ::2].clamp(max=limit)
    up = x[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * (gate * alpha).sigmoid())


BINDING = activation(
    "SwigluOAIAndMul",
    _native,
    # What gpt-oss's experts call where they are not one kernel; in CUDA builds.
    gated("_C::swigluoai_and_mul", ("out", "input", "alpha", "limit")),
    not_reached=(
        EXPERTS,
        "experts whose gates all come before their up projections (`swigluoai_uninterleave`): "
        "another op",
    ),
    when=has_experts,  # in gpt-oss and MiniMax's models: experts alone
)
