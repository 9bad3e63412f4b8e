"""Where vLLM runs `silu_and_mul_with_clamp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, LayerPlace
from vllm_fl.contracts.sizes import INTERMEDIATE

from ._activation import SHARED, gated
from ._models import mentions
from ._phrases import EXPERTS, HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    half = x.shape[-1] // 2
    gate = x[..., :half].clamp(max=limit)
    up = x[..., half:].clamp(min=-limit, max=limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


BINDING = Binding(
    places=(
        LayerPlace("vllm.model_executor.layers.activation.SiluAndMulWithClamp", _native),
        # What experts call where they are not one kernel; in CUDA builds.
        gated("_C::silu_and_mul_with_clamp", ("result", "input", "limit", "alpha", "beta")),
    ),
    sizes=(INTERMEDIATE,),
    not_reached=(
        EXPERTS,
        "routed experts under expert parallelism: vLLM's own kernel for them leaves out what other "
        "ranks compute",
        HW_AGNOSTIC,
    ),
    when=mentions("swiglu"),  # as `swiglu_limit`
    former_layers=("silu_and_mul_with_clamp",),
    shared=SHARED,
)
