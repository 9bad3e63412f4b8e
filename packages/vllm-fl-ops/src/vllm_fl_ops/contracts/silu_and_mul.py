"""SwiGLU's activation: silu of one half of the features, times the other half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import declared, tensor
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .activations import gated_inputs, served_gated_inputs

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


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    for name, x in gated_inputs(Source(dtype, device)):
        yield Sample(name, (x,))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    for name, x, scale in served_gated_inputs(sizes, dtype, device, large):
        yield Sample(name, (x,), scale)


SPEC = declared(
    silu_and_mul,
    {
        "x": tensor("..., 2 * d"),
    },
    (tensor("..., d"),),
    samples=_samples,
    served=_served,
    by_token=frozenset({"x"}),
    second_form=_by_torch,
    tolerances={
        "float32": Tolerance(
            1.3e-6, 1e-5, "PyTorch's own fp32 default (vLLM's too); room for a fast exp"
        ),
        "float16": Tolerance(
            2e-3,
            1e-4,
            "4 roundings of 2^-11: vLLM's native rounds silu and the product (2); "
            "atol for subnormals below 6e-5 and a fast exp",
        ),
        "bfloat16": Tolerance(
            1.6e-2,
            1e-4,
            "4 roundings of 2^-8, as vLLM's bf16 default; atol for a fast exp of a far gate",
        ),
    },
)
