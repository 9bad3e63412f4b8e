"""The gate-and-up product of an MLP, fused with its activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import tensor
from vllm_fl.contracts.sampling import UNIQUE_ROWS, Source, peak
from vllm_fl.contracts.spec import ModelSizes, OpSpec, Sample, Tolerance

from .common import contract
from .linear import LINEAR_SHAPES, broken_rows, by_features, layouts, product, repeated

if TYPE_CHECKING:
    import torch


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T), where silu(g) = g * sigmoid(g).

    Args:
        x: (tokens, in_features), float32, float16 or bfloat16, of any layout; in_features is at
            least 1. NaN and infinity affect only their row.
        weight: (2 * out_features, in_features), of x's dtype and device, of any layout: the rows of
            gate, then of up.

    Returns:
        (tokens, out_features), contiguous, of x's dtype and device. Both products and silu may be
        rounded to that dtype, or kept in a wider dtype. The inputs are not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), SwiGLU; in vLLM,
    `MergedColumnParallelLinear` followed by `SiluAndMul`.
    """
    gate, up = product(x, weight).chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def linear_gelu_tanh_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """gelu(x @ gate.T) * (x @ up.T), with gelu's approximation by tanh.

    gelu(g) is g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) / 2.

    Args:
        x: (tokens, in_features), float32, float16 or bfloat16, of any layout; in_features is at
            least 1. NaN and infinity affect only their row.
        weight: (2 * out_features, in_features), of x's dtype and device, of any layout: the rows of
            gate, then of up.

    Returns:
        (tokens, out_features), contiguous, of x's dtype and device. Both products and gelu may be
        rounded to that dtype, or kept in a wider dtype. The inputs are not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), GEGLU; Hendrycks and
    Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415); in vLLM, `MergedColumnParallelLinear`
    followed by `GeluAndMul` with approximate="tanh".
    """
    gate, up = product(x, weight).chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + inner.tanh()) * up


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import gelu

    return gelu(gate, approximate="tanh")


def silu(gate: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import silu as by_torch

    return by_torch(gate)


def _gated_product(
    oracle: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> OpSpec:
    """Return the contract of a product with an activation; the weight has the gate's rows first.

    Args:
        oracle: the op, in fp64.
        activation: the activation by another formula than in `oracle`.
    """

    def by_other_formulas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = by_features(x, weight).chunk(2, dim=-1)
        return activation(gate) * up

    return contract(
        oracle,
        {
            "x": tensor("tokens, in_features", where="in_features >= 1"),
            "weight": tensor("2 * out_features, in_features", "x"),
        },
        (tensor("tokens, out_features"),),
        bad=_bad,
        samples=_samples,
        served=_served,
        read_whole=frozenset({"weight"}),
        second_form=by_other_formulas,
        tolerances=TOLERANCES,
    )


def _samples(source: Source) -> Iterator[Sample]:
    for name, tokens, features, out in (*LINEAR_SHAPES, ("many features", 40, 2184, 96)):
        yield _of(name, source, source.normal(tokens, features), out)
    for name, x, out in layouts(source):
        yield _of(name, source, x, out)

    x = source.normal(5, 192)
    weight = source.normal(64, 192 + 32, scale=192**-0.5)[:, 16 : 16 + 192]
    yield Sample("weight out of a wider matrix", (x, weight))
    weight = source.normal(192, 64, scale=192**-0.5).t()
    yield Sample("weight transposed", (x, weight))
    weight = source.normal(192, 192, scale=192**-0.5).t()
    yield Sample("square weight, transposed", (x, weight))

    far = _of("gates far from zero", source, source.normal(6, 256), 64, scale=300.0)
    far.args[1][:64] *= 300.0  # an activation is g or 0 here; exp(g) overflows
    yield far
    # Gates reach 4 to 16, which finds an activation that is clamped nearer to zero. Up is beyond
    # any limit.
    far = _of("up far from zero", source, source.normal(6, 256), 64, scale=4 * 300.0)
    far.args[1][:64] *= 4.0
    far.args[1][64:] *= 300.0
    yield far
    # All results are 0. With a clamped gate or sigmoid, they would not be.
    below = _of("gates far below zero", source, source.normal(6, 256).abs(), 64)
    below.args[1][:64] = -30.0 * below.args[1][:64].abs()
    below.args[1][64:] *= 300.0
    yield below
    yield _of("NaN and infinity", source, broken_rows(source), 37)


def _of(name: str, source: Source, x: torch.Tensor, out: int, scale: float = 1.0) -> Sample:
    features = x.shape[1]
    return Sample(name, (x, source.normal(2 * out, features, scale=features**-0.5)), scale)


def _served(
    source: Source, sizes: ModelSizes, hidden: int, dense_intermediate: int
) -> Iterator[Sample]:
    if not dense_intermediate:
        return
    # In float16 the products stay below 65504; in wider dtypes they exceed it.
    most = 320.0 if str(source.dtype) == "torch.float16" else peak(source.dtype)
    for tokens in sizes.tokens:
        x, scale = source.normal(tokens, hidden), 1.0
        if source.large:
            # Both products have the magnitude most / 8, as in `linear`.
            x = source.spiked(tokens, hidden, scale=most / 32, peak=most)
            scale = (most / 8) ** 2
        name = f"{tokens} x {hidden} -> 2*{dense_intermediate}{', large' * source.large}"
        columns = source.rows(dense_intermediate)
        few = _of(name, source, x, min(dense_intermediate, UNIQUE_ROWS), scale)
        yield repeated(few, columns, 1, parts=2)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    weight = good["weight"]
    yield "all of integers", {name: value.long() for name, value in good.items()}
    yield "weight is 1-D", {"weight": weight[0]}
    yield "an odd number of rows", {"weight": weight[:-1]}
    yield "gate and up in a separate dimension", {"weight": weight.unflatten(0, (2, -1))}


TOLERANCES = {
    "float32": Tolerance(
        1e-5,
        5e-5,
        "as for `linear`, but the error of one product is multiplied by the other",
    ),
    "float16": Tolerance(
        2e-3,
        6e-3,
        "4 roundings of 2^-11: both products, the activation and the result; atol because partial "
        "sums may be rounded to float16, as in `linear`, and the error of one product is "
        "multiplied by the other",
    ),
    "bfloat16": Tolerance(
        1.6e-2, 5e-2, "4 roundings of 2^-8, vLLM's bf16 default; atol as for float16"
    ),
}


SPECS = (
    _gated_product(linear_silu_and_mul, silu),
    _gated_product(linear_gelu_tanh_and_mul, gelu_tanh),
)
