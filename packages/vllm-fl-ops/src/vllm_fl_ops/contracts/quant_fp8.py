"""Quantisation of activations to fp8, with one scale, or a scale per token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, tensor
from vllm_fl.contracts.outputs import QuantisedPair
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import activations, contract

if TYPE_CHECKING:
    import torch

MOST = 448.0
"""The largest number of float8_e4m3fn."""

LEAST_SCALE = 1 / (MOST * 512)


def quant_fp8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    per_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest float8_e4m3fn to x / scale, saturating at 448: x is close to value * scale.

    Without `scale`, the scale is max |x| / 448. The maximum is over all of x, or with `per_token`
    over each row, and is limited to `scale_ub`. The scale is then at least 1 / (448 * 512).

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16, of any layout; hidden is at least 1. The
            result of a row with NaN or infinity is unspecified. With `scale` or `per_token`, other
            rows are not affected. With neither, all of x must be finite; the result is unspecified
            if all |x| are below 1 / 512, because some kernels then have no minimum scale.
        scale: one float32 number, in any shape, in the units of x, above 0 and not subnormal; None
            to compute it from x.
        scale_ub: one float32 number, in any shape, in the units of x, above 0. Only with
            `per_token`; None for no bound.
        per_token: whether to compute a scale for each token. Only without `scale`.

    Returns:
        (value, scale), contiguous, on x's device. They share no memory with an argument. value is
        float8_e4m3fn, (tokens, hidden); ties may round either way. scale is float32, (1,), or
        (tokens, 1) with `per_token`, or a copy of the argument in its shape. x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), E4M3; scales as
    in vLLM's `QuantFP8`.
    """
    wide = x.double()
    if scale is not None:
        steps = scale.double().clone()
    else:
        size = wide.abs()
        if per_token:
            largest = size.amax(-1, keepdim=True)
        else:
            largest = (size.amax() if x.numel() else wide.new_zeros(())).reshape(1)
        if scale_ub is not None:
            largest = largest.clamp(max=scale_ub.double().reshape(()))
        steps = (largest / MOST).clamp(min=LEAST_SCALE)
    one = steps.reshape(()) if steps.numel() == 1 else steps
    return (wide / one).clamp(-MOST, MOST) * one, steps


def _by_limits(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """First find the x that maps to the largest value, then clamp x to it."""
    import torch

    x, scale, scale_ub, per_token = call
    wide = x.to(torch.float64)
    if scale is not None:
        limit = scale.to(torch.float64) * 448
    else:
        rows = wide if per_token else wide.reshape(1, -1)
        both = torch.cat((rows, -rows, rows.new_full((len(rows), 1), 1 / 512)), dim=1)
        limit = both.sort(dim=1).values[:, -1:]
        if scale_ub is not None:
            bound = torch.full_like(limit, float(scale_ub))
            limit = torch.maximum(torch.minimum(limit, bound), torch.full_like(limit, 1 / 512))
        if not per_token:
            limit = limit[0]
    most = limit.reshape(-1, 1) if limit.numel() == len(x) else limit.reshape(-1)
    return torch.sign(wide) * torch.minimum(wide.abs(), most), limit / 448


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    def number(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=source.device)

    yield Sample("1 token", (source.normal(1, 64), None, None, False))
    yield Sample("0 tokens, per token", (source.normal(0, 64), None, None, True))
    uneven = source.normal(16, 5 * 67)
    uneven *= torch.arange(1, 17, device=source.device).to(source.dtype)[:, None] / 8
    uneven[-1, -1] = 20.0  # the largest of all
    yield Sample("16 tokens, odd hidden size", (uneven, None, None, False))
    yield Sample("16 tokens, odd hidden size, per token", (uneven, None, None, True))
    small = source.normal(5, 96)
    small[2], small[3] = 0.0, small[3] * 1e-4
    yield Sample("a row of zeros, and a small one, per token", (small, None, None, True))
    x = source.normal(8, 3 * 64)[::2, 64:128]
    yield Sample("strided rows", (x, None, None, False))
    yield Sample("strided rows, bounded, per token", (x, None, number(1.5), True))
    x = source.normal(7, 130)
    yield Sample("static", (x, number(0.011, 1), None, False))
    yield Sample("static, saturating on both sides", (x, number(0.0031), None, False))
    yield Sample("static, 0 tokens", (x[:0], number(0.02, 1), None, False))
    broken = source.normal(5, 96)
    broken[1, 7], broken[3, 40] = math.nan, math.inf
    yield Sample("NaN and infinity, per token", (broken, None, None, True), open_rows=(1, 3))
    args = broken.clone(), number(0.011, 1), None, False
    yield Sample("NaN and infinity, static", args, open_rows=(1, 3))


def _served(source: Source, sizes: ModelSizes, hidden: int) -> Iterator[Sample]:
    import torch

    most = peak(source.dtype)
    for tokens in sizes.tokens:
        x = activations(source, tokens, hidden, scale=1.0)
        size = f"{tokens} x {hidden}{', large' * source.large}"
        yield Sample(f"{size}, per tensor", (x, None, None, False))
        yield Sample(f"{size}, per token", (x, None, None, True))
        step = most / 400 if source.large else 0.01
        scale = torch.full((1,), step, dtype=torch.float32, device=source.device)
        yield Sample(f"{size}, static", (x, scale, None, False))
        if inner := sizes.intermediate:  # the input of the MLP's second product
            x = activations(source, tokens, inner, scale=1.0)
            size = f"{tokens} x {inner}{', large' * source.large}"
            yield Sample(f"{size}, per token", (x, None, None, True))


def _fake(x: torch.Tensor, scale: torch.Tensor | None, scale_ub: Any, per_token: bool) -> Any:
    import torch

    shape = scale.shape if scale is not None else (x.shape[0], 1) if per_token else (1,)
    value = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return value, x.new_empty(shape, dtype=torch.float32)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    x, one = good["x"], good["x"].new_ones(1).float()
    yield "3-D, per token", {"x": x[None], "per_token": True}
    yield "no feature", {"x": x[:, :0]}
    yield "no feature, per token", {"x": x[:, :0], "per_token": True}
    yield "no feature, static", {"x": x[:, :0], "scale": one}
    yield "a scale for each token", {"scale": x[:, :1].float()}
    yield "a scale in double", {"scale": one.double()}
    yield "a bound for all of x", {"scale_ub": one}
    yield "a bound in double", {"scale_ub": one.double(), "per_token": True}
    yield "per_token with a scale", {"scale": one, "per_token": True}


SPEC = contract(
    quant_fp8,
    {
        "x": tensor("tokens, hidden", where="hidden >= 1"),
        "scale": tensor("", "float32").optional(),
        "per_token": flag("not value or scale is None"),
        "scale_ub": tensor("", "float32", where="per_token").optional(),
    },
    _fake,
    bad=_bad,
    group="quant",
    samples=_samples,
    served=_served,
    second_form=_by_limits,
    dtypes=("float32", "float16", "bfloat16"),
    tolerances={
        "float32": Tolerance(
            1e-6,
            0.0,
            "a maximum is exact, and its division one rounding of 2^-24 (two if multiplied by "
            "1/448)",
        )
    },
    outputs=(QuantisedPair(steps=0.5),),
    whole_batch=True,  # all rows share a scale
    ignores_repeats=True,  # repeats keep the maximum
)
