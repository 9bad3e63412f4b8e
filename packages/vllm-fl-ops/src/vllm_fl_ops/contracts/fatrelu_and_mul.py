"""FATReLU's gated activation: the gate where it is above a threshold, times the other half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import scalar
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import Sample

from .activations import activation, activation_inputs, broken_row
from .common import not_finite, of_layer, rounded

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def fatrelu_and_mul(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    """gate * x[..., d:], where d = x.shape[-1] // 2.

    gate is x[..., :d] where that is above `threshold`, and 0 elsewhere.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection.
            Nothing is promised for a NaN in the gate itself: vLLM's CUDA kernel takes it for 0.
        threshold: in the units of x; finite. Where x's dtype cannot represent it, it may be rounded
            to that before it is compared.

    Returns:
        (..., d), contiguous, of x's dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype, its last dimension is odd, or `threshold` is
            not such a number.

    Source: Song et al., "ProSparse: Introducing and Enhancing Intrinsic Activation Sparsity within
    Large Language Models" (arXiv:2402.13516), FATReLU.
    """
    gate, up = x.double().chunk(2, dim=-1)
    return gate.masked_fill(gate <= threshold, 0.0) * up


def _by_product(x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    half = x.shape[-1] // 2
    gate, up = x[..., :half].double(), x[..., half:].double()
    return (gate > threshold).double() * (gate * up)


def _samples(source: Source) -> Iterator[Sample]:
    for name, x in activation_inputs(source, 2):
        yield Sample(name, (x, 0.25))  # which every dtype represents
    near = source.normal(8, 2 * 128)
    near[:, ::3] = 0.5
    yield Sample("gates at the threshold", (near, 0.5))
    yield Sample("threshold below 0", (near, -0.5))
    yield Sample("NaN in a row", (broken_row(source, 2), 0.25), open_rows=(1,))


SPEC = activation(
    fatrelu_and_mul,
    _by_product,
    rounded(
        float32=(1e-9, "; one product, rounded once"),
        float16=(1e-6, "; atol for subnormals, which are 6e-8 apart"),
        bfloat16=(1e-6, ""),
    ),
    gated=True,
    beside={"threshold": scalar()},
    samples=_samples,
    call=lambda x: (x, 0.25),
    bad=lambda good: not_finite("threshold"),
    **of_layer("threshold"),
)
