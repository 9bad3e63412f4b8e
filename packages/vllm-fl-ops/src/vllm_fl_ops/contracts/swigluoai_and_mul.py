"""gpt-oss's activation: a clamped SwiGLU, gate and up projection side by side in every pair."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import declared, scalar, tensor
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .activations import (
    broken_row,
    gated_inputs,
    served_gated_inputs,
)
from .common import not_finite, of_layer

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def swigluoai_and_mul(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), of clamped pairs (gate, up).

    gate is x[..., ::2], at most `limit`; up is x[..., 1::2], from -limit to limit.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate and up projection take
            turns. Nothing is promised for a NaN itself: some of vLLM's CUDA kernels clamp it to
            `limit`.
        alpha: how steep the sigmoid is; finite.
        limit: in the units of x; finite and above 0. One that x's dtype cannot represent may be
            rounded to it.

    Returns:
        (..., d), contiguous, of x's dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype, its last dimension is odd, or alpha or limit
            is not such a number.

    Source: OpenAI, gpt-oss (arXiv:2508.10925), the activation of its experts, as
    `GptOssExperts` of Hugging Face Transformers 4.55 computes it.
    """
    wide = x.double()
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * (alpha * gate).sigmoid()


def _by_tanh(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    import torch

    most = torch.tensor(limit, dtype=torch.float64, device=x.device)
    gate, up = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    gate = torch.minimum(gate, most)
    up = torch.sign(up) * torch.minimum(up.abs(), most)
    return gate * (0.5 + 0.5 * torch.tanh(gate * alpha / 2)) + up * gate / (
        1 + torch.exp(-alpha * gate)
    )


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for name, x in gated_inputs(source):
        if not name.startswith("NaN"):
            yield Sample(name, (x, 1.702, 7.0))
    infinite = source.normal(5, 2 * 256)
    infinite[1, 6], infinite[1, 9], infinite[3, 301] = math.inf, math.inf, -math.inf
    yield Sample("infinity, which is clamped", (infinite, 1.702, 7.0))
    far = source.normal(16, 2 * 128, scale=6.0)
    yield Sample("beyond the limit on either side", (far, 1.702, 7.0))
    yield Sample("another limit", (far, 1.702, 1.5))
    yield Sample("another alpha", (far, 1.0, 7.0))
    yield Sample("alpha of 0, which leaves half of the gate", (far, 0.0, 7.0))
    yield Sample("NaN in a row", (broken_row(source, 2), 1.702, 7.0), open_rows=(1,))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    for name, x, _ in served_gated_inputs(sizes, dtype, device, large):
        pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        yield Sample(name, (pairs, 1.702, 7.0))  # clamped: results are of magnitude 1 all the same


SPEC = declared(
    swigluoai_and_mul,
    {
        "x": tensor("..., 2 * d"),
        "alpha": scalar(),
        "limit": scalar("value > 0"),
    },
    (tensor("..., d"),),
    bad=lambda good: not_finite("alpha", "limit"),
    **of_layer("alpha", "limit"),
    samples=_samples,
    served=_served,
    by_token=frozenset({"x"}),
    second_form=_by_tanh,
    tolerances={
        "float32": Tolerance(
            1.3e-6, 1e-5, "PyTorch's own fp32 default (vLLM's too); room for a fast exp"
        ),
        "float16": Tolerance(
            2e-3,
            4e-4,
            "4 roundings of 2^-11; atol because vLLM's native rounds alpha * gate before the "
            "sigmoid: seen up to 2.8e-4 beyond that, at a gate near -2.4 and up at the limit",
        ),
        "bfloat16": Tolerance(
            1.6e-2,
            1e-3,
            "4 roundings of 2^-8, as vLLM's bf16 default; atol because vLLM's native rounds "
            "alpha * gate before the sigmoid: seen up to 6.4e-4 beyond that, at a gate near -2.8",
        ),
    },
)
