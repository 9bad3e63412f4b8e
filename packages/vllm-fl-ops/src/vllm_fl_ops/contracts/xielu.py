"""xIELU, Apertus's activation: two learned slopes, one on each side of 0."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant

from .activations import (
    activation_inputs,
    bad_activation_inputs,
    broken_row,
    served_activation_inputs,
)

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


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


def _fake(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _check(x: Any, alpha_p: Any, alpha_n: Any, beta: Any, eps: Any) -> Problem:
    return (
        floating_tensor("x", x)
        or _one_element("alpha_p", alpha_p, x)
        or _one_element("alpha_n", alpha_n, x)
        or _one_element("beta", beta, x)
        or _one_element("eps", eps, x)
    )


def _one_element(name: str, value: Any, x: torch.Tensor) -> Problem:
    problem = floating_tensor(name, value) or on_device_of(name, value, "x", x)
    if problem:
        return problem
    if value.dtype != x.dtype and str(value.dtype) != "torch.bfloat16":
        return name, f"must be of x's dtype {x.dtype} or bfloat16, got {value.dtype}"
    if value.numel() != 1:
        return name, f"must have one element, got {value.numel()}"
    return None


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


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for name, x in activation_inputs(source):
        yield Sample(name, _learned(x))
    yield Sample("other slopes", _learned(source.normal(5, 256), 1.5, 0.75, 0.25))
    yield Sample("far other slopes", _learned(source.normal(5, 256), -2.0, 3.0, 1.0))
    yield Sample("NaN in a row", _learned(broken_row(source)), open_rows=(1,))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    for name, x, scale in served_activation_inputs(sizes, dtype, device, large):
        yield Sample(name, _learned(x), scale)


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    source = Source(dtype, device)
    x = source.normal(4, 8)
    right = _learned(x)
    for name, bad in bad_activation_inputs(source):
        yield BadInput(name, (bad, *right[1:]), "x")
    for at, name in enumerate(("alpha_p", "alpha_n", "beta", "eps"), start=1):
        for what, value in (
            ("a number", 0.5),
            ("8 elements", x[0]),
            ("float64", x[0, :1].double()),
        ):
            yield BadInput(f"{name} of {what}", (*right[:at], value, *right[at + 1 :]), name)


SPEC = OpSpec(
    oracle=xielu,
    variants=(
        Variant(
            "", "(Tensor x, Tensor alpha_p, Tensor alpha_n, Tensor beta, Tensor eps) -> Tensor"
        ),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"x"}),
    bad_inputs=_bad_inputs,
    second_form=_by_torch,
    tolerances={
        "float32": Tolerance(
            1.3e-6, 1e-6, "PyTorch's own fp32 default (vLLM's too); atol as the two terms cancel"
        ),
        "float16": Tolerance(
            2e-3,
            4e-3,
            "4 roundings of 2^-11; atol because vLLM's native rounds both terms, of which one is "
            "subtracted below 0: seen up to 2.6e-3 beyond that, at a result of 1.0",
        ),
        "bfloat16": Tolerance(
            1.6e-2,
            1.6e-2,
            "4 roundings of 2^-8, as vLLM's bf16 default; atol because vLLM's native rounds both "
            "terms: seen up to 9.4e-3 beyond that, at a result of 0.16 with a steep slope",
        ),
    },
    from_layer=MappingProxyType(
        {
            "alpha_p": lambda layer: layer.alpha_p,
            "alpha_n": lambda layer: layer.alpha_n,
            "beta": lambda layer: layer.beta,
            "eps": lambda layer: layer.eps,
        }
    ),
    # vLLM's layer asks whether the package xielu has given it a kernel.
    layer=lambda **learned: SimpleNamespace(**learned, _xielu_cuda_obj=None),
)
