"""The gates of a gated delta rule: how fast a state fades, and the strength of a token's update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import like, tensor
from vllm_fl.contracts.outputs import Within
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract

if TYPE_CHECKING:
    import torch


def gdn_gating(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = -exp(A_log) * log(1 + exp(a + dt_bias)), and beta = sigmoid(b).

    Args:
        a: (tokens, heads), float32, float16 or bfloat16, of any layout: usually one half of a
            projection's result, with b as the other half. The formula also applies to NaN and
            infinity in a or b, which affect only their own element.
        b: of a's shape, dtype and device, of any layout.
        A_log: (heads,), the logarithm of each head's rate, of a's dtype or float32.
        dt_bias: (heads,), added to every row of a, of a's dtype or float32.

    Returns:
        (g, beta), both (tokens, heads) and contiguous. g is float32 and at most 0: the logarithm of
        the decay factor of a head's state. beta has b's dtype, and is from 0 to 1. The inputs are
        not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), with the parameters of Mamba 2
    (Dao and Gu, arXiv:2405.21060).
    """
    rate = a.double() + dt_bias.double()
    softplus = rate.clamp(min=0) + (-rate.abs()).exp().log1p()
    return -A_log.double().exp() * softplus, b.double().sigmoid()


def _by_logsigmoid(*call: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch.nn.functional as F

    a, b, A_log, dt_bias = call
    keeps = F.logsigmoid(-(a.double() + dt_bias.double()))
    return keeps * A_log.double().exp(), 0.5 + 0.5 * (b.double() / 2).tanh()


def _calls(source: Source, tokens: int, heads: int, scale: float = 1.0) -> tuple[Any, ...]:
    import torch

    A_log = source.normal(heads, dtype=torch.float32).abs()
    a, b = (source.normal(tokens, heads, scale=scale) for _ in "ab")
    return a, b, A_log, source.normal(heads)


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    for tokens in (1, 16, 0):
        yield Sample(f"{tokens} token{'s' * (tokens != 1)}", _calls(source, tokens, 8))
    yield Sample("odd sizes", _calls(source, 5, 3))
    yield Sample("1 head", _calls(source, 7, 1))
    *_, A_log, dt_bias = _calls(source, 1, 6)
    halves = source.normal(6, 12)
    yield Sample("halves of one tensor", (halves[:, 6:], halves[:, :6], A_log, dt_bias))
    far = _calls(source, 9, 16, scale=12.0)
    far[0][3] = 96.0  # e^96 overflows float32
    yield Sample("far from zero", far)
    a, b, A_log, dt_bias = _calls(source, 4, 8)
    yield Sample("A_log in the dtype of a", (a, b, A_log.to(source.dtype), dt_bias))
    yield Sample("dt_bias in float32", (a, b, A_log, dt_bias.to(torch.float32)))
    a, b, A_log, dt_bias = _calls(source, 5, 8)
    a[1, 2], a[2, 3], a[3, 4] = math.nan, math.inf, -math.inf
    b[1, 5], b[2, 6], b[3, 7] = math.nan, math.inf, -math.inf
    yield Sample("NaN and infinity", (a, b, A_log, dt_bias))


def _served(source: Source, sizes: ModelSizes, linear_value_heads: int) -> Iterator[Sample]:
    heads = linear_value_heads
    for tokens in sizes.tokens:
        call = _calls(source, tokens, heads, scale=12.0 if source.large else 1.0)
        yield Sample(f"{tokens} x {heads} heads{', large' * source.large}", call)


SPEC = contract(
    gdn_gating,
    {
        "a": tensor("tokens, heads"),
        "b": like("a"),
        "A_log": tensor("heads", "a", "float32"),
        "dt_bias": tensor("heads", "a", "float32"),
    },
    (tensor("tokens, heads", "float32"), like("b")),
    bad=lambda good: [("dt_bias of integers", {"dt_bias": good["dt_bias"].int()})],
    group="linear_attention",
    samples=_samples,
    served=_served,
    second_form=_by_logsigmoid,
    outputs=(Within(), Within()),
    tolerances={
        "float32": Tolerance(
            2.6e-6,
            1e-5,
            "twice PyTorch's fp32 default for two exponentials and a logarithm; atol for log(1 + "
            "exp(x)) if 1 + exp(x) is rounded, times exp(A_log) up to 20",
        ),
        "float16": Tolerance(1e-3, 1e-4, "2 roundings of 2^-11; atol for a fast exp near 0"),
        "bfloat16": Tolerance(8e-3, 1e-4, "2 roundings of 2^-8; atol for a fast exp near 0"),
    },
)
