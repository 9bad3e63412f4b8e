"""SwiGLU's activation: silu of one half of the features, times the other half."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.spec import Sample

from .activations import activation, gated_inputs
from .common import rounded

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:], where d = x.shape[-1] // 2 and silu(g) = g * sigmoid(g).

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection.

    Returns:
        (..., d), contiguous, of x's dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype, or its last dimension is odd.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), SwiGLU.
    """
    gate, up = x.double().chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def _by_torch(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import silu

    gate, up = x.double().chunk(2, dim=-1)
    return silu(gate) * up


SPEC = activation(
    silu_and_mul,
    _by_torch,
    rounded(
        float32=(1e-5, "; room for a fast exp"),
        float16=(
            1e-4,
            ": vLLM's native rounds silu and the product (2); atol for subnormals below 6e-5 and "
            "a fast exp",
        ),
        bfloat16=(1e-4, "; atol for a fast exp of a far gate"),
    ),
    gated=True,
    samples=lambda source: (Sample(name, (x,)) for name, x in gated_inputs(source)),
)
