"""GELU by a hyperbolic tangent, as GPT-2 has it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .activations import activation
from .common import rounded

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2, of every element.

    Args:
        x: float32, float16 or bfloat16, of any shape and layout.

    Returns:
        x's shape, contiguous, of its dtype and on its device. x is left as it was. A value below
        -3 may come out as 0: vLLM's native form and its CUDA kernels round 1 + tanh to x's dtype.

    Raises:
        CallError: x is not a tensor of such a dtype.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), section 2, the
    approximation by tanh; `gelu_new` of Hugging Face Transformers, GPT-2's activation.
    """
    wide = x.double()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    # exp keeps the digits that 1 + tanh loses for a negative x
    return wide / (1 + (-2 * inner).exp())


def _by_torch(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import gelu

    return gelu(x.double(), approximate="tanh")


SPEC = activation(
    gelu_new,
    _by_torch,
    rounded(
        float32=(1e-5, "; atol because 1 + tanh cancels"),
        float16=(
            6e-4,
            "; atol because vLLM's native form and its CUDA kernel round tanh, whose sum with 1 "
            "cancels: seen up to 4.4e-4 beyond that, at -3.6, which gives 0",
        ),
        bfloat16=(
            4e-3,
            "; atol because vLLM's native form and its CUDA kernel round tanh: seen up to 2.9e-3 "
            "beyond that, at -3.1, which gives 0",
        ),
    ),
)
