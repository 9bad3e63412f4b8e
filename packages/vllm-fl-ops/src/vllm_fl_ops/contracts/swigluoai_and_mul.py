"""gpt-oss's activation: a clamped SwiGLU, gate and up projection side by side in every pair."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import scalar
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import Sample

from .activations import activation, broken_row, gated_inputs
from .common import not_finite, of_layer, rounded

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


def _samples(source: Source) -> Iterator[Sample]:
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


def _in_pairs(x: torch.Tensor) -> tuple[Any, ...]:
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), 1.702, 7.0


SPEC = activation(
    swigluoai_and_mul,
    _by_tanh,
    rounded(
        float32=(1e-5, "; room for a fast exp"),
        float16=(
            4e-4,
            "; atol because vLLM's native rounds alpha * gate before the sigmoid: seen up to "
            "2.8e-4 beyond that, at a gate near -2.4 and up at the limit",
        ),
        bfloat16=(
            1e-3,
            "; atol because vLLM's native rounds alpha * gate before the sigmoid: seen up to "
            "6.4e-4 beyond that, at a gate near -2.8",
        ),
    ),
    gated=True,
    beside={"alpha": scalar(), "limit": scalar("value > 0")},
    samples=_samples,
    call=_in_pairs,
    power=0,  # clamped: results are of magnitude 1 all the same
    bad=lambda good: not_finite("alpha", "limit"),
    **of_layer("alpha", "limit"),
)
