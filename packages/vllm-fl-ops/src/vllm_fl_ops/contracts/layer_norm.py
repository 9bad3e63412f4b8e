"""Layer normalisation: mean 0 and spread 1 over the features, then weight and bias."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import like, scalar, tensor
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample

from .common import contract, rounded

if TYPE_CHECKING:
    import torch


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, over the last dimension.

    The variance is the mean of the squared deviations: the divisor is the number of features.

    Args:
        x: (..., hidden), float32, float16 or bfloat16, of any layout. A row with NaN or infinity
            gives only NaN, and affects no other row.
        weight: (hidden,), of x's dtype or float32, on x's device, or None for 1.
        bias: (hidden,), in the units of the result, of weight's dtype and on x's device, or None
            for 0. Must be None if weight is None.
        epsilon: added to the variance, in its units; finite and above 0.

    Returns:
        (..., hidden), contiguous, of x's dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450), equation 4, with the
    epsilon of `torch.nn.LayerNorm`.
    """
    wide = x.double()
    apart = wide - wide.mean(dim=-1, keepdim=True)
    normed = apart * (apart.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    if weight is not None:
        normed = normed * weight.double()
    return normed if bias is None else normed + bias.double()


def _by_moments(*call: Any) -> torch.Tensor:
    x, weight, bias, epsilon = call
    wide = x.double()
    mean = wide.sum(-1, keepdim=True) / x.shape[-1]
    variance = (wide * wide).sum(-1, keepdim=True) / x.shape[-1] - mean * mean
    factor = 1 / (variance + epsilon) ** 0.5
    factor = factor if weight is None else factor * weight.double()
    result: torch.Tensor = wide * factor - mean * factor
    return result if bias is None else result + bias.double()


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    def sample(name: str, x: torch.Tensor, epsilon: float = 1e-5) -> Sample:
        weight, bias = source.normal(x.shape[-1]), source.normal(x.shape[-1])
        return Sample(name, (x, weight, bias, epsilon))

    for name, shape in (
        ("1 token", (1, 512)),
        ("16 tokens", (16, 128)),
        ("0 tokens", (0, 64)),
        ("1 feature, with a deviation of 0", (3, 1)),
        ("odd sizes, 3-D", (2, 3, 129)),
        ("beyond one block", (2, 1031)),
    ):
        yield sample(name, source.normal(*shape))
    yield sample("first columns of a wider buffer", source.normal(5, 192)[:, :128])
    yield sample("mean far from 0", source.normal(4, 256) + 30.0)
    yield sample("epsilon matters", source.normal(4, 256, scale=3e-3))
    x = source.normal(4, 256)
    yield Sample("weight=None, bias=None", (x, None, None, 1e-5))
    yield Sample("bias=None", (x, source.normal(256), None, 1e-3))
    wide = (source.normal(256, dtype=torch.float32) for _ in range(2))
    yield Sample("fp32 weight and bias", (x, *wide, 1e-6))
    wide = (source.normal(320, dtype=torch.float32) for _ in range(2))
    yield Sample("fp32 weight and bias, 300 rows", (source.normal(300, 320), *wide, 1e-6))
    yield Sample("strided weight and bias", (x, *source.normal(256, 2).unbind(-1), 1e-5))
    equal = source.normal(4, 64)
    equal[1], equal[3] = 0.0, 1.5
    yield sample("rows of equal numbers", equal)
    broken = source.normal(4, 256)
    broken[1, 7], broken[3, 200] = math.nan, math.inf
    yield sample("NaN and infinity", broken)


def _served(source: Source, sizes: ModelSizes, hidden: int) -> Iterator[Sample]:
    for tokens in sizes.tokens:
        weight, bias = source.normal(hidden), source.normal(hidden)
        if source.large:
            x = source.spiked(tokens, hidden, scale=30.0, peak=peak(source.dtype))
        else:
            x = source.normal(tokens, hidden)
            x[5::16] *= 1e-3
            x[9::64] = 0.0
        name = f"{tokens} x {hidden}{', large' * source.large}"
        yield Sample(name, (x, weight, bias, sizes.epsilon))


def _layer(weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> object:
    return SimpleNamespace(weight=weight, bias=bias, eps=epsilon)


SPEC = contract(
    layer_norm,
    {
        "x": tensor("..., hidden", where="hidden >= 1"),
        "weight": tensor("hidden", "x", "float32").optional(),
        "bias": tensor(
            "hidden", "x", "float32", where="weight is not None and bias.dtype == weight.dtype"
        ).optional(),
        "epsilon": scalar("value > 0"),
    },
    (like("x"),),
    group="norms",
    samples=_samples,
    served=_served,
    read_whole=frozenset({"weight", "bias"}),
    second_form=_by_moments,
    tolerances=rounded(
        float32=(
            1e-5,
            "; room for x * factor - mean * factor, which loses 2 * 2^-24 of the mean, 30 times "
            "the spread in samples",
        ),
        float16=(1e-4, "; atol as for float32, where the bias cancels"),
        bfloat16=(1e-4, "; atol as for float16"),
    ),
    from_layer={
        "weight": lambda layer: None if layer.weight is None else layer.weight.data,
        "bias": lambda layer: None if layer.bias is None else layer.bias.data,
        "epsilon": lambda layer: layer.eps,
    },
    layer=_layer,
)
