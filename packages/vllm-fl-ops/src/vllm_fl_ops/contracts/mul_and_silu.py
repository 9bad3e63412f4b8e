"""SwiGLU's activation with the gate in the second half of the features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .activations import activation
from .silu_and_mul import SPEC as SILU_AND_MUL

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """x[..., :d] * silu(x[..., d:]), where d = x.shape[-1] // 2 and silu(g) = g * sigmoid(g).

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: up, then gate projection.

    Returns:
        (..., d), contiguous, of x's dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype, or its last dimension is odd.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), SwiGLU; the order of the
    halves is that of Molmo and Ultravox.
    """
    up, gate = x.double().chunk(2, dim=-1)
    return up * gate * gate.sigmoid()


def _by_torch(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import silu

    up, gate = x.double().chunk(2, dim=-1)
    return up * silu(gate)


SPEC = activation(
    mul_and_silu,
    _by_torch,
    SILU_AND_MUL.tolerances,
    gated=True,
)
