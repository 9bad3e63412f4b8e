"""A clamped SwiGLU, the gate in the first half of the features: DeepSeek V4's activation."""

from __future__ import annotations

import math
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


def silu_and_mul_with_clamp(
    x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta), of clamped halves, where d = x.shape[-1] // 2.

    gate is x[..., :d], at most `limit`; up is x[..., d:], from -limit to limit. `swigluoai_and_mul`
    is the same of pairs, with alpha of 1.702 and beta of 1.

    Args:
        x: (..., 2 * d), float32, float16 or bfloat16, of any layout: gate, then up projection.
            Nothing is promised for a NaN itself: vLLM's CUDA kernel clamps it to `limit`.
        limit: in the units of x; finite and above 0. One that x's dtype cannot represent may be
            rounded to it.
        alpha: how steep the sigmoid is; finite.
        beta: what is added to up, in the units of x; finite.

    Returns:
        (..., d), contiguous, of x's dtype and on its device. x is left as it was.

    Raises:
        CallError: x is not a tensor of such a dtype, its last dimension is odd, or limit, alpha or
            beta is not such a number.

    Source: the `swiglu_limit` of DeepSeek-V4's experts, as vLLM's `SiluAndMulWithClamp` computes
    it; alpha and beta are those of gpt-oss (arXiv:2508.10925).
    """
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


def _by_tanh(x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> torch.Tensor:
    import torch

    most = torch.tensor(limit, dtype=torch.float64, device=x.device)
    gate, up = x.double().unflatten(-1, (2, -1)).unbind(-2)
    gate = torch.minimum(gate, most)
    up = torch.sign(up) * torch.minimum(up.abs(), most)
    silu = gate * (0.5 + 0.5 * torch.tanh(gate * alpha / 2))
    return silu * up + silu * beta


def _samples(source: Source) -> Iterator[Sample]:
    for name, x in activation_inputs(source, 2):
        yield Sample(name, (x, 7.0, 1.0, 0.0))
    infinite = source.normal(5, 2 * 256)
    infinite[1, 6], infinite[1, 262], infinite[3, 301] = math.inf, math.inf, -math.inf
    yield Sample("infinity, which is clamped", (infinite, 10.0, 1.0, 0.0))
    far = source.normal(16, 2 * 128, scale=6.0)
    yield Sample("another limit, alpha and beta", (far, 1.5, 1.702, 1.0))
    yield Sample("NaN in a row", (broken_row(source, 2), 7.0, 1.0, 0.0), open_rows=(1,))


SPEC = activation(
    silu_and_mul_with_clamp,
    _by_tanh,
    rounded(
        float32=(1e-5, "; room for a fast exp"),
        float16=(
            4e-4,
            "; atol because vLLM's native rounds alpha * gate and up + beta: seen up to 2.1e-4 "
            "beyond that, at a result of -0.3",
        ),
        bfloat16=(
            1e-3,
            "; atol because vLLM's native rounds alpha * gate and up + beta: seen up to 7.2e-4 "
            "beyond that, at a result of -0.11",
        ),
    ),
    gated=True,
    beside={"limit": scalar("value > 0"), "alpha": scalar(), "beta": scalar()},
    samples=_samples,
    call=lambda x: (x, 7.0, 1.0, 0.0),
    power=0,  # clamped: results are below 50 all the same
    bad=lambda good: not_finite("limit", "alpha", "beta"),
    **of_layer(limit="swiglu_limit", alpha="alpha", beta="beta"),
)
