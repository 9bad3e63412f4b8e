"""Where vLLM runs `xielu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._activation import activation
from ._models import mentions

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


BINDING = activation("XIELU", _native, when=mentions("xielu"))
