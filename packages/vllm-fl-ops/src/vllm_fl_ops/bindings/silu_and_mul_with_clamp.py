"""Where vLLM runs `silu_and_mul_with_clamp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation, gated
from ._models import mentions
from ._phrases import EXPERTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    half = x.shape[-1] // 2
    gate = x[..., :half].clamp(max=limit)
    up = x[..., half:].clamp(min=-limit, max=limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


BINDING = activation(
    "SiluAndMulWithClamp",
    _native,
    # What experts call where they are not one kernel; in CUDA builds.
    gated("_C::silu_and_mul_with_clamp", ("result", "input", "limit", "alpha", "beta")),
    not_reached=(
        EXPERTS,
        "routed experts under expert parallelism: vLLM's own kernel for them leaves out what other "
        "ranks compute",
    ),
    when=mentions("swiglu"),  # as `swiglu_limit`
    former_layers=("silu_and_mul_with_clamp",),
)
