"""GELU by a hyperbolic tangent, with the constant to ten digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .activations import activation
from .gelu_new import SPEC as GELU_NEW

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(0.7978845608 * x * (1 + 0.044715 * x**2))) / 2, of every element.

    `gelu_new` with sqrt(2 / pi) to ten digits, and the tanh's argument by other roundings.

    Args:
        x: float32, float16 or bfloat16, of any shape and layout.

    Returns:
        x's shape, contiguous, of its dtype and on its device. x is left as it was. A value below
        -3 may come out as 0: vLLM's native form and its CUDA kernels round 1 + tanh to x's dtype.

    Raises:
        CallError: x is not a tensor of such a dtype.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), section 2, the
    approximation by tanh; `gelu_fast` of Hugging Face Transformers.
    """
    wide = x.double()
    # exp keeps the digits that 1 + tanh loses for a negative x
    return wide / (1 + (-2 * 0.7978845608 * wide * (1 + 0.044715 * wide.square())).exp())


def _by_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    inner = 0.7978845608 * wide + 0.7978845608 * 0.044715 * wide**3
    return wide * (0.5 + 0.5 * inner.tanh())


SPEC = activation(
    gelu_fast,
    _by_tanh,
    GELU_NEW.tolerances,
)
