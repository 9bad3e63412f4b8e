"""Quantisation of activations to fp8, with a scale for each group of a token's features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, integer, scalar, tensor
from vllm_fl.contracts.outputs import QuantisedPair
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import activations, contract, not_finite

if TYPE_CHECKING:
    import torch

MOST = 448.0
"""The largest number of float8_e4m3fn."""


def quant_fp8_group(
    x: torch.Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest float8_e4m3fn to x / scale: x is close to value * scale of its group.

    A group is `group_size` features of a token. Its scale is max(largest |x|, `eps`) / 448; with
    `ue8m0`, rounded up to a power of two.

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16, of any layout; hidden is at least 1. The
            result of a row with NaN or infinity is unspecified, and affects no other row.
        group_size: features of a group, at least 1; divides hidden.
        eps: in the units of x; finite and above 0.
        ue8m0: whether scales are powers of two. The result of a group with a scale below 1e-10 is
            then unspecified, because some kernels have a minimum scale of that size.

    Returns:
        (value, scale), contiguous, on x's device. value is float8_e4m3fn, (tokens, hidden); ties
        may round either way. scale is float32, (tokens, hidden / group_size). x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 3.3.2: tiles of
    1 x 128; the powers of two are the scales of the Open Compute Project's "Microscaling Formats
    (MX) v1.0" (E8M0).
    """
    groups = x.double().unflatten(-1, (-1, group_size))
    steps = groups.abs().amax(-1).clamp(min=eps) / MOST
    if ue8m0:
        steps = steps.log2().ceil().exp2()
    one = steps.unsqueeze(-1)
    return ((groups / one).clamp(-MOST, MOST) * one).flatten(-2), steps


def _by_frexp(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute group by group, with powers of two from the number's exponent. Nothing saturates."""
    import torch

    x, group_size, eps, ue8m0 = call
    wide = x.to(torch.float64)
    steps = []
    for group in wide.split(group_size, dim=1):
        low, high = group.aminmax(dim=1)
        step = torch.maximum(torch.maximum(-low, high), low.new_tensor(eps)) * (1 / 448)
        if ue8m0:
            fraction, exponent = torch.frexp(step)
            step = torch.ldexp(torch.ones_like(step), exponent - (fraction == 0.5).int())
        steps.append(step)
    return wide.clone(), torch.stack(steps, dim=1)


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    def uneven(tokens: int, groups: int, size: int) -> torch.Tensor:
        """Groups of very different magnitudes, from 1/8 up."""
        x = source.normal(tokens, groups * size)
        power = torch.arange(tokens * groups, device=source.device).view(tokens, groups, 1) % 7
        return (x.view(tokens, groups, size) * (2.0**power).to(source.dtype) / 8).flatten(1)

    yield Sample("1 token", (uneven(1, 4, 128), 128, 1e-10, False))
    yield Sample("0 tokens", (source.normal(0, 256), 128, 1e-10, False))
    yield Sample("16 tokens", (uneven(16, 3, 128), 128, 1e-10, False))
    yield Sample("groups of 64", (uneven(5, 6, 64), 64, 1e-10, False))
    yield Sample("one group a token", (uneven(7, 1, 128), 128, 1e-10, False))
    yield Sample("strided rows", (uneven(6, 6, 128)[::2, 128:384], 128, 1e-10, False))
    zeros = uneven(3, 2, 128)
    zeros[1, :128], zeros[2, 128:] = 0.0, zeros[2, 128:] * 1e-5
    yield Sample("a group of zeros, and a small one", (zeros, 128, 1e-10, False))
    yield Sample("a larger eps", (zeros, 128, 0.25, False))
    yield Sample("powers of two", (uneven(16, 3, 128), 128, 1e-10, True))
    exact = uneven(4, 2, 64)
    exact.view(4, 2, 64)[:, :, 5] = exact.new_tensor([7.0, 3.5])  # 448 is 7 times a power of two
    exact.clamp_(-7.0, 7.0).view(4, 2, 64)[:, 1].clamp_(-3.5, 3.5)
    yield Sample("powers of two, of exact ones", (exact, 64, 1e-10, True))
    yield Sample("features apart", (uneven(4, 4, 128)[:, ::2], 128, 1e-10, False))
    broken = uneven(5, 2, 128)
    broken[1, 7], broken[3, 200] = math.nan, math.inf
    yield Sample("NaN and infinity", (broken, 128, 1e-10, False), open_rows=(1, 3))


def _served(source: Source, sizes: ModelSizes, hidden: int) -> Iterator[Sample]:
    width = max(128, hidden // 128 * 128)
    for tokens in sizes.tokens:
        x = activations(source, tokens, width, scale=1.0)
        for ue8m0 in (False, True):
            how = f"{', powers of two' * ue8m0}{', large' * source.large}"
            yield Sample(f"{tokens} x {width} by 128{how}", (x, 128, 1e-10, ue8m0))
        if inner := (sizes.intermediate or 0) // 128 * 128:  # the input of the MLP's second product
            x = activations(source, tokens, inner, scale=1.0)
            name = f"{tokens} x {inner} by 128{', large' * source.large}"
            yield Sample(name, (x, 128, 1e-10, False))


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "no feature", {"x": good["x"][:, :0]}
    yield "ue8m0 is a number", {"ue8m0": 2}
    yield from not_finite("eps")


SPEC = contract(
    quant_fp8_group,
    {
        "x": tensor("tokens, hidden", where="hidden >= 1"),
        "group_size": integer("value >= 1 and hidden % value == 0"),
        "eps": scalar("value > 0"),
        "ue8m0": flag(),
    },
    (tensor("tokens, hidden", "float8_e4m3fn"), tensor("tokens, hidden // group_size", "float32")),
    bad=_bad,
    group="quant",
    samples=_samples,
    served=_served,
    second_form=_by_frexp,
    dtypes=("float32", "float16", "bfloat16"),
    tolerances={
        "float32": Tolerance(
            1e-6,
            1.2e-10,
            "a maximum is exact, and its division one rounding of 2^-24 (two if multiplied by "
            "1/448); a power of two is exact; atol for kernels with a minimum scale of 1e-10",
        )
    },
    outputs=(QuantisedPair(steps=0.5),),
)
