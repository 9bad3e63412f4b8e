"""Where vLLM runs `fatrelu_and_mul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation, gated
from ._models import mentions

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(x: Tensor, threshold: float = 0.0) -> Tensor:
    from torch.nn.functional import threshold as above

    half = x.shape[-1] // 2
    return above(x[..., :half], threshold, 0.0) * x[..., half:]


BINDING = activation(
    "FatreluAndMul",
    _native,
    gated("_C::fatrelu_and_mul", ("out", "input", "threshold")),
    when=mentions("fatrelu"),
)
