"""Elementwise activations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import tensor
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import Sample

from .activations import activation_spec
from .common import of_layer, rounded

if TYPE_CHECKING:
    import torch


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2, elementwise.

    Args:
        x: float32, float16 or bfloat16, of any shape and layout.

    Returns:
        Contiguous, of x's shape, dtype and device. x is not modified. The result for a value below
        -3 may be 0, because vLLM's implementation and its CUDA kernels round 1 + tanh to x's dtype.

    Raises:
        CallError: an argument violates this contract.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), section 2, the
    approximation by tanh; `gelu_new` of Hugging Face Transformers, GPT-2's activation.
    """
    wide = x.double()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    # exp keeps the digits that 1 + tanh loses for a negative x
    return wide / (1 + (-2 * inner).exp())


def _new_by_torch(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import gelu

    return gelu(x.double(), approximate="tanh")


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(0.7978845608 * x * (1 + 0.044715 * x**2))) / 2, elementwise.

    This is `gelu_new` with sqrt(2 / pi) to ten digits. The argument of tanh is rounded differently.

    Args:
        x: float32, float16 or bfloat16, of any shape and layout.

    Returns:
        Contiguous, of x's shape, dtype and device. x is not modified. The result for a value below
        -3 may be 0, because vLLM's implementation and its CUDA kernels round 1 + tanh to x's dtype.

    Raises:
        CallError: an argument violates this contract.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), section 2, the
    approximation by tanh; `gelu_fast` of Hugging Face Transformers.
    """
    wide = x.double()
    # exp keeps the digits that 1 + tanh loses for a negative x
    return wide / (1 + (-2 * 0.7978845608 * wide * (1 + 0.044715 * wide.square())).exp())


def _fast_by_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    inner = 0.7978845608 * wide + 0.7978845608 * 0.044715 * wide**3
    return wide * (0.5 + 0.5 * inner.tanh())


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 * x), elementwise.

    Args:
        x: float32, float16 or bfloat16, of any shape and layout.

    Returns:
        Contiguous, of x's shape, dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), section 2, the
    approximation by a sigmoid; `QuickGELU` of OpenAI's CLIP.
    """
    wide = x.double()
    return wide * (1.702 * wide).sigmoid()


def _quick_by_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (0.5 + 0.5 * (0.851 * wide).tanh())


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)**2, elementwise.

    Args:
        x: float32, float16 or bfloat16, of any shape and layout. The result for a NaN is
            unspecified, because vLLM's CUDA kernel reads it as 0.

    Returns:
        Contiguous, of x's shape, dtype and device. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling"
    (arXiv:2109.08668).
    """
    return x.double().clamp(min=0).square()


def _relu2_by_sign(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide + wide.abs()) / 2


LEARNED = ("alpha_p", "alpha_n", "beta", "eps")
"""The arguments after x. The layer has attributes with the same names."""


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
        alpha_p: one element, of x's dtype or bfloat16, the learned value. vLLM keeps it in bfloat16
            for any dtype of x, so softplus may be rounded to bfloat16.
        alpha_n: like alpha_p.
        beta: one element, of x's dtype or bfloat16: the slope at 0.
        eps: one element, of x's dtype or bfloat16, at most 0: the largest argument of expm1.

    Returns:
        Contiguous, of x's shape, dtype and device. The inputs are not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Huang, "Deriving Activation Functions Using Integration" (arXiv:2411.13010), xIELU,
    computed as in vLLM's `XIELU`.
    """
    wide = x.double()
    a, b = beta.double(), eps.double()
    p = alpha_p.double().exp().log1p()
    n = a + alpha_n.double().exp().log1p()
    below = n * (wide.minimum(b).expm1() - wide)
    return (p * wide.square()).where(wide > 0, below) + a * wide


def _xielu_by_torch(*call: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import softplus

    x, alpha_p, alpha_n, beta, eps = call
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
    """Arguments of a call.

    The defaults are xIELU's initial values: softplus(alpha_p) = 0.8, softplus(alpha_n) = 0.3.
    """
    return (
        x,
        x.new_full((1,), alpha_p),
        x.new_full((1,), alpha_n),
        x.new_full((), beta),
        x.new_full((), -1e-6),
    )


def _other_slopes(source: Source) -> Iterator[Sample]:
    yield Sample("other slopes", _learned(source.normal(5, 256), 1.5, 0.75, 0.25))
    yield Sample("far other slopes", _learned(source.normal(5, 256), -2.0, 3.0, 1.0))


GELU_BY_TANH = rounded(
    float32=(1e-5, "; atol because 1 + tanh cancels"),
    float16=(
        6e-4,
        "; atol because vLLM's native code and CUDA kernel round tanh, and 1 + tanh cancels: "
        "measured up to 4.4e-4 beyond rtol, at -3.6, where they return 0",
    ),
    bfloat16=(
        4e-3,
        "; atol because vLLM's native code and CUDA kernel round tanh: measured up to 2.9e-3 "
        "beyond rtol, at -3.1, where they return 0",
    ),
)


SPECS = (
    activation_spec(gelu_new, _new_by_torch, GELU_BY_TANH),
    activation_spec(gelu_fast, _fast_by_tanh, GELU_BY_TANH),
    activation_spec(
        quick_gelu,
        _quick_by_tanh,
        rounded(
            float32=(1e-5, "; room for a fast exp"),
            float16=(
                1e-4,
                "; atol because vLLM's native code rounds 1.702 * x before the sigmoid (measured "
                "up to 2.2e-5 beyond rtol, at -2.4), for subnormals and a fast exp",
            ),
            bfloat16=(
                1e-4,
                "; atol because vLLM's native code rounds 1.702 * x before the sigmoid (measured "
                "up to 2.5e-5 beyond rtol, at -2.8)",
            ),
        ),
    ),
    activation_spec(
        relu2,
        _relu2_by_sign,
        rounded(
            float32=(1e-9, "; a square is rounded once"),
            float16=(1e-6, "; atol for subnormals, which are 6e-8 apart"),
            bfloat16=(1e-6, ""),
        ),
        special=False,
    ),
    activation_spec(
        xielu,
        _xielu_by_torch,
        rounded(
            float32=(1e-6, "; atol because the two terms cancel"),
            float16=(
                4e-3,
                "; atol because vLLM's native code rounds both terms, and one is subtracted below "
                "0: measured up to 2.6e-3 beyond rtol, at a result of 1.0",
            ),
            bfloat16=(
                1.6e-2,
                "; atol because vLLM's native code rounds both terms: measured up to 9.4e-3 "
                "beyond rtol, at a result of 0.16 with a steep slope",
            ),
        ),
        beside=dict.fromkeys(LEARNED, tensor("", "x", "bfloat16")),
        special=False,
        further=_other_slopes,
        call=_learned,
        bad=lambda good: ((f"{name} of more", {name: good["x"]}) for name in LEARNED),
        from_layer=of_layer(*LEARNED)["from_layer"],
        # vLLM's layer checks whether the package xielu provides its kernel.
        layer=lambda **learned: SimpleNamespace(**learned, _xielu_cuda_obj=None),
    ),
)
