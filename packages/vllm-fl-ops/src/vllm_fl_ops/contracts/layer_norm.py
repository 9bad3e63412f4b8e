"""Layer normalisation: the mean is taken away, and the spread made 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of, shaped
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, over the last dimension.

    The variance is the mean of the squared deviations: it is divided by the number of features.

    Args:
        x: (..., hidden), float32, float16 or bfloat16, of any layout. A row with NaN or infinity
            gives NaN alone, and no other row does.
        weight: (hidden,), of x's dtype or float32, on x's device, or None for 1.
        bias: (hidden,), in the units of the result, of weight's dtype and on x's device, or None
            for 0. Without a weight there is none.
        epsilon: added to the variance, in its units; finite and above 0.

    Returns:
        (..., hidden), contiguous, of x's dtype and on its device. x is left as it was.

    Raises:
        CallError: an argument is not as said here.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450), equation 4, with the
    epsilon of `torch.nn.LayerNorm`.
    """
    wide = x.double()
    apart = wide - wide.mean(dim=-1, keepdim=True)
    normed = apart * (apart.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    if weight is not None:
        normed = normed * weight.double()
    return normed if bias is None else normed + bias.double()


def _by_moments(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    wide = x.double()
    mean = wide.sum(-1, keepdim=True) / x.shape[-1]
    variance = (wide * wide).sum(-1, keepdim=True) / x.shape[-1] - mean * mean
    factor = 1 / (variance + epsilon) ** 0.5
    factor = factor if weight is None else factor * weight.double()
    result = wide * factor - mean * factor
    return result if bias is None else result + bias.double()


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _check(x: Any, weight: Any, bias: Any, epsilon: Any) -> Problem:
    problem = floating_tensor("x", x)
    if problem:
        return problem
    if x.ndim == 0 or not x.shape[-1]:
        return "x", f"must have at least one feature, got {tuple(x.shape)}"
    return (
        _check_weight("weight", weight, x)
        or _check_weight("bias", bias, x)
        or _check_pair(weight, bias)
        or _check_epsilon(epsilon)
    )


def _check_weight(name: str, weight: Any, x: torch.Tensor) -> Problem:
    if weight is None:
        return None
    problem = floating_tensor(name, weight)
    problem = problem or shaped(name, weight, x.shape[-1:], "the shape (hidden,) =")
    if problem:
        return problem
    if weight.dtype != x.dtype and str(weight.dtype) != "torch.float32":
        return name, f"must have x's dtype {x.dtype} or float32, got {weight.dtype}"
    return on_device_of(name, weight, "x", x)


def _check_pair(weight: torch.Tensor | None, bias: torch.Tensor | None) -> Problem:
    if bias is None:
        return None
    if weight is None:
        return "bias", "must be None without a weight"
    if weight.dtype != bias.dtype:
        return "bias", f"must have weight's dtype {weight.dtype}, got {bias.dtype}"
    return None


def _check_epsilon(epsilon: Any) -> Problem:
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)):
        return "epsilon", f"must be a number, got {type(epsilon).__name__}"
    if not 0 < epsilon < math.inf:
        return "epsilon", f"must be finite and above 0, got {epsilon}"
    return None


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    import torch

    source = Source(dtype, device)

    def sample(name: str, x: torch.Tensor, epsilon: float = 1e-5) -> Sample:
        weight, bias = source.normal(x.shape[-1]), source.normal(x.shape[-1])
        return Sample(name, (x, weight, bias, epsilon))

    for name, shape in (
        ("1 token", (1, 512)),
        ("16 tokens", (16, 128)),
        ("0 tokens", (0, 64)),
        ("1 feature, whose deviation is 0", (3, 1)),
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


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    if sizes.hidden is None:
        return
    source = Source(dtype, device, large)
    for tokens in sizes.tokens:
        weight, bias = source.normal(sizes.hidden), source.normal(sizes.hidden)
        if large:
            x = source.spiked(tokens, sizes.hidden, scale=30.0, peak=peak(dtype))
        else:
            x = source.normal(tokens, sizes.hidden)
            x[5::16] *= 1e-3
            x[9::64] = 0.0
        name = f"{tokens} x {sizes.hidden}{', large' * large}"
        yield Sample(name, (x, weight, bias, sizes.epsilon))


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    import torch

    source = Source(dtype, device)
    integers = torch.ones(4, 8, dtype=torch.int64, device=source.device)

    def bad(name: str, argument: str, **change: Any) -> BadInput:
        good = {
            "x": source.normal(4, 8),
            "weight": source.normal(8),
            "bias": source.normal(8),
            "epsilon": 1e-5,
        }
        return BadInput(name, tuple((good | change).values()), argument)

    yield bad("x is not a tensor", "x", x=[1.0, 2.0])
    yield bad("x of integers", "x", x=integers)
    yield bad("weight is not a tensor", "weight", weight="w")
    yield bad("weight of another size", "weight", weight=source.normal(7))
    yield bad("weight that would broadcast", "weight", weight=source.normal(1))
    yield bad("bias of another size", "bias", bias=source.normal(7))
    yield bad("bias without a weight", "bias", weight=None)
    yield bad("epsilon is no number", "epsilon", epsilon="1e-5")
    yield bad("epsilon is 0: equal features would be divided by it", "epsilon", epsilon=0.0)
    yield bad("epsilon is negative", "epsilon", epsilon=-1.0)


def _layer(weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> object:
    return SimpleNamespace(weight=weight, bias=bias, eps=epsilon)


SPEC = OpSpec(
    oracle=layer_norm,
    variants=(Variant("", "(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor"),),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"x"}),
    read_whole=frozenset({"weight", "bias"}),
    bad_inputs=_bad_inputs,
    second_form=_by_moments,
    tolerances={
        "float32": Tolerance(
            1.3e-6,
            1e-5,
            "PyTorch's own fp32 default (vLLM's too); room for x * factor - mean * factor, which "
            "loses 2 * 2^-24 of the mean, 30 times the spread in samples",
        ),
        "float16": Tolerance(
            2e-3, 1e-4, "4 roundings of 2^-11; atol as for float32, where the bias cancels"
        ),
        "bfloat16": Tolerance(
            1.6e-2, 1e-4, "4 roundings of 2^-8, as vLLM's bf16 default; atol as for float16"
        ),
    },
    from_layer=MappingProxyType(
        {
            "weight": lambda layer: None if layer.weight is None else layer.weight.data,
            "bias": lambda layer: None if layer.bias is None else layer.bias.data,
            "epsilon": lambda layer: layer.eps,
        }
    ),
    layer=_layer,
)
