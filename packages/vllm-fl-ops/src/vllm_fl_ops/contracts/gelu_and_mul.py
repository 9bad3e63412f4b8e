"""GeGLU's activation: gelu of one half of the features, times the other half."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import word
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample

from .activations import activation, gated_inputs, served_gated_inputs
from .common import of_layer, rounded

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]

APPROXIMATIONS = ("none", "tanh")


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(x[..., :d]) * x[..., d:], where d = x.shape[-1] // 2.

    gelu(g) is g * (1 + erf(g / sqrt(2))) / 2, or with approximate="tanh"
    g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) / 2.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection.
        approximate: "none" or "tanh".

    Returns:
        (..., d), contiguous, of x's dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype, its last dimension is odd, or `approximate`
            is another word.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415); Shazeer, "GLU
    Variants Improve Transformer" (arXiv:2002.05202), GEGLU.
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    gate, up = x.double().chunk(2, dim=-1)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + inner.tanh()) * up
    # erfc keeps the digits that 1 + erf loses for a negative gate
    return 0.5 * gate * (-gate / math.sqrt(2)).erfc() * up


def _by_torch(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    from torch.nn.functional import gelu

    gate, up = x.double().chunk(2, dim=-1)
    return gelu(gate, approximate=approximate) * up


def _samples(source: Source) -> Iterator[Sample]:
    for approximate in APPROXIMATIONS:
        for name, x in gated_inputs(Source(source.dtype, source.device)):
            yield Sample(f"{name}, approximate={approximate}", (x, approximate))


def _served(source: Source, sizes: ModelSizes) -> Iterator[Sample]:
    for approximate in APPROXIMATIONS:
        for name, x, scale in served_gated_inputs(sizes, source.dtype, source.device, source.large):
            yield Sample(f"{name}, approximate={approximate}", (x, approximate), scale)


SPEC = activation(
    gelu_and_mul,
    _by_torch,
    rounded(
        float32=(1e-5, "; atol because 1 + erf cancels for a negative gate"),
        float16=(
            1e-4,
            ": vLLM's native rounds gelu and the product (2); atol for that cancellation in fp32 "
            "and for subnormals below 6e-5",
        ),
        bfloat16=(1e-4, "; atol for that cancellation in fp32"),
    ),
    gated=True,
    beside={"approximate": word(*APPROXIMATIONS)},
    samples=_samples,
    served=_served,
    **of_layer("approximate"),
)
