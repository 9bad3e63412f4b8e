"""xIELU, Apertus's activation: two learned slopes, one on each side of 0."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import tensor
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import Sample

from .activations import activation, activation_inputs, broken_row
from .common import of_layer, rounded

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]

LEARNED = ("alpha_p", "alpha_n", "beta", "eps")
"""The arguments beside x, which a layer has under these names."""


def xielu(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
) -> torch.Tensor:
    """p * x**2 + beta * x above 0, and n * (expm1(min(x, eps)) - x) + beta * x elsewhere.

    p is softplus(alpha_p), n is beta + softplus(alpha_n), softplus(a) = log(1 + exp(a)).

    Args:
        x: float32, float16 or bfloat16, of any shape and layout.
        alpha_p: one element, of x's dtype, as the model has learned it. vLLM keeps it in bfloat16,
            whatever x is: softplus may then be rounded to that.
        alpha_n: the same.
        beta: one element, of x's dtype or bfloat16: the slope at 0.
        eps: one element, of x's dtype or bfloat16, at most 0: where expm1 begins.

    Returns:
        x's shape, contiguous, of its dtype and on its device. Nothing is overwritten.

    Raises:
        CallError: x is not a tensor of such a dtype, or another argument is no tensor of one
            element, of such a dtype and on x's device.

    Source: Huang, "Deriving Activation Functions Using Integration" (arXiv:2411.13010), xIELU, as
    vLLM's `XIELU` computes it.
    """
    wide = x.double()
    a, b = beta.double(), eps.double()
    p = alpha_p.double().exp().log1p()
    n = a + alpha_n.double().exp().log1p()
    below = n * (wide.minimum(b).expm1() - wide)
    return (p * wide.square()).where(wide > 0, below) + a * wide


def _by_torch(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
) -> torch.Tensor:
    from torch.nn.functional import softplus

    wide, slope = x.double(), float(beta)
    above, below = wide.clamp(min=0), wide.clamp(max=0)
    n = slope + softplus(alpha_n.double())
    falls = below.clamp(max=float(eps)).exp() - 1
    return above * (softplus(alpha_p.double()) * above + slope) + (
        falls * n - (n - slope) * below
    ) * (wide <= 0)


def _learned(
    x: torch.Tensor, alpha_p: float = 0.2, alpha_n: float = -1.05, beta: float = 0.5
) -> tuple[torch.Tensor, ...]:
    """The arguments of a call: a model starts at softplus of 0.8 and 0.3, and a slope of 0.5."""
    return (
        x,
        x.new_full((1,), alpha_p),
        x.new_full((1,), alpha_n),
        x.new_full((), beta),
        x.new_full((), -1e-6),
    )


def _samples(source: Source) -> Iterator[Sample]:
    for name, x in activation_inputs(source):
        yield Sample(name, _learned(x))
    yield Sample("other slopes", _learned(source.normal(5, 256), 1.5, 0.75, 0.25))
    yield Sample("far other slopes", _learned(source.normal(5, 256), -2.0, 3.0, 1.0))
    yield Sample("NaN in a row", _learned(broken_row(source)), open_rows=(1,))


SPEC = activation(
    xielu,
    _by_torch,
    rounded(
        float32=(1e-6, "; atol as the two terms cancel"),
        float16=(
            4e-3,
            "; atol because vLLM's native rounds both terms, of which one is subtracted below 0: "
            "seen up to 2.6e-3 beyond that, at a result of 1.0",
        ),
        bfloat16=(
            1.6e-2,
            "; atol because vLLM's native rounds both terms: seen up to 9.4e-3 beyond that, at a "
            "result of 0.16 with a steep slope",
        ),
    ),
    beside=dict.fromkeys(LEARNED, tensor("", "x", "bfloat16")),
    samples=_samples,
    call=_learned,
    bad=lambda good: ((f"{name} of more", {name: good["x"]}) for name in LEARNED),
    from_layer=of_layer(*LEARNED)["from_layer"],
    # vLLM's layer asks whether the package xielu has given it a kernel.
    layer=lambda **learned: SimpleNamespace(**learned, _xielu_cuda_obj=None),
)
