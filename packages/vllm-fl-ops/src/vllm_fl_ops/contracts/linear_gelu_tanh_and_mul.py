"""The gate-and-up product of an MLP and its activation, GeGLU's by tanh, in one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .gated_products import gated_product, gelu_tanh
from .linear import product

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def linear_gelu_tanh_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """gelu(x @ gate.T) * (x @ up.T), with gelu's approximation by tanh.

    gelu(g) is g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) / 2.

    Args:
        x: (tokens, in_features), float32, float16 or bfloat16, of any layout. in_features is 1 or
            more. NaN and infinity spoil their own row alone.
        weight: (2 * out_features, in_features), of x's dtype and on its device, of any layout: the
            rows of gate, then those of up.

    Returns:
        (tokens, out_features), contiguous, of x's dtype and on its device. Both products and gelu
        may be rounded to that dtype on the way, or be kept in a wider one. The inputs are left as
        they were.

    Raises:
        CallError: an argument is not as said here.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), GEGLU; Hendrycks and
    Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415); of vLLM's layers
    `MergedColumnParallelLinear` and `GeluAndMul` with approximate="tanh" behind it.
    """
    gate, up = product(x, weight).chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + inner.tanh()) * up


SPEC = gated_product(linear_gelu_tanh_and_mul, gelu_tanh)
