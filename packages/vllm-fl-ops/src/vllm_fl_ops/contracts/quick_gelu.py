"""GELU by a sigmoid, as CLIP has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .activations import activation
from .common import rounded

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x), of every element.

    Args:
        x: float32, float16 or bfloat16, of any shape and layout.

    Returns:
        x's shape, contiguous, of its dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), section 2, the
    approximation by a sigmoid; `QuickGELU` of OpenAI's CLIP.
    """
    wide = x.double()
    return wide * (1.702 * wide).sigmoid()


def _by_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (0.5 + 0.5 * (0.851 * wide).tanh())


SPEC = activation(
    quick_gelu,
    _by_tanh,
    rounded(
        float32=(1e-5, "; room for a fast exp"),
        float16=(
            1e-4,
            "; atol because vLLM's native form rounds 1.702 * x before the sigmoid (seen up to "
            "2.2e-5 beyond that, at -2.4), for subnormals and a fast exp",
        ),
        bfloat16=(
            1e-4,
            "; atol because vLLM's native form rounds 1.702 * x before the sigmoid (seen up to "
            "2.5e-5 beyond that, at -2.8)",
        ),
    ),
)
