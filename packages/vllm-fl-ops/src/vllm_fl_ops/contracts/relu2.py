"""The square of ReLU, as Primer and Nemotron have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .activations import activation
from .common import rounded

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)**2, of every element.

    Args:
        x: float32, float16 or bfloat16, of any shape and layout. Nothing is promised for a NaN
            itself: vLLM's CUDA kernel takes it for 0.

    Returns:
        x's shape, contiguous, of its dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling"
    (arXiv:2109.08668).
    """
    return x.double().clamp(min=0).square()


def _by_sign(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide + wide.abs()) / 2


SPEC = activation(
    relu2,
    _by_sign,
    rounded(
        float32=(1e-9, "; a square is rounded once"),
        float16=(1e-6, "; atol for subnormals, which are 6e-8 apart"),
        bfloat16=(1e-6, ""),
    ),
    special=False,
)
