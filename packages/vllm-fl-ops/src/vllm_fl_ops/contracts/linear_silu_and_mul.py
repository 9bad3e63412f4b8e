"""The gate-and-up product of an MLP and its activation, SwiGLU's, in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .gated_products import gated_product, silu
from .linear import product

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T), where silu(g) = g * sigmoid(g).

    Args:
        x: (tokens, in_features), float32, float16 or bfloat16, of any layout. in_features is 1 or
            more. NaN and infinity spoil their own row alone.
        weight: (2 * out_features, in_features), of x's dtype and on its device, of any layout: the
            rows of gate, then those of up.

    Returns:
        (tokens, out_features), contiguous, of x's dtype and on its device. Both products and silu
        may be rounded to that dtype on the way, or be kept in a wider one. The inputs are left as
        they were.

    Raises:
        CallError: an argument is not as said here.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), SwiGLU; of vLLM's layers
    `MergedColumnParallelLinear` and `SiluAndMul` behind it.
    """
    gate, up = product(x, weight).chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


SPEC = gated_product(linear_silu_and_mul, silu)
