"""Quantisation of activations to int8, with a scale per token, or a scale from the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, tensor
from vllm_fl.contracts.outputs import Exact, QuantisedPair
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance, Variant

from .common import activations, contract

if TYPE_CHECKING:
    import torch

LOWEST, HIGHEST = -128.0, 127.0


def quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """The nearest int8 to x / scale + azp, saturating: x is close to (value - azp) * scale.

    Without `scale`, each row has its own scale: max |x| / 127, without a zero point. With
    `asymmetric`, the scale is (max x - min x) / 255, and the zero point is the integer nearest to
    -128 - min x / scale. In a row of equal numbers, min and max include 0, which makes the result
    exact. The zero point of a row of zeros is -128.

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16, of any layout; hidden is at least 1. The
            result of a row with NaN or infinity is unspecified, and affects no other row.
        scale: one float32 number, in any shape, in the units of x, above 0 and not subnormal; None
            for a scale per token.
        azp: one int32 number, in any shape: the value that represents x = 0. Only with `scale`;
            None for 0.
        asymmetric: True for a zero point per token, which is then the third result. Otherwise None,
            not False, because the number of results depends on it. Only without `scale`.

    Returns:
        (value, scale), or (value, scale, azp) with `asymmetric`; contiguous, on x's device. They
        share no memory with an argument. value is int8, (tokens, hidden); ties may round either
        way. scale is float32, (tokens, 1), or a copy of the argument in its shape. A row of zeros
        has a scale of at most 1e-12. azp is int32, (tokens, 1). x is not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference" (arXiv:1712.05877), section 2.1; ranges as in vLLM's
    `scaled_int8_quant`.
    """
    import torch

    wide = x.double()
    if scale is None and asymmetric:
        low, high = wide.aminmax(dim=-1, keepdim=True)
        equal = low == high
        low, high = low.clamp(max=0).where(equal, low), high.clamp(min=0).where(equal, high)
        steps = (high - low) / 255
        zero = (LOWEST - (low / steps).nan_to_num()).round()
        exact = ((wide / steps + zero).clamp(LOWEST, HIGHEST)) * steps
        return exact.masked_fill(steps == 0, 0.0), steps, zero.to(torch.int32)
    if scale is None:
        return wide.clone(), wide.abs().amax(-1, keepdim=True) / HIGHEST
    steps = scale.double()
    one = steps.reshape(())
    values = wide / one if azp is None else wide / one + azp.double().reshape(())
    return values.clamp(LOWEST, HIGHEST) * one, steps.clone()


def _by_limits(*call: Any) -> tuple[torch.Tensor, ...]:
    """Clamp x to the limits in its units, instead of the quantised values."""
    import torch

    x, scale, azp, asymmetric = call
    wide = x.to(torch.float64)
    if scale is not None:
        one, whole = float(scale), 0 if azp is None else int(azp)
        least, most = ((limit - whole) * one for limit in (LOWEST, HIGHEST))
        inside = torch.minimum(torch.maximum(wide, wide.new_tensor(least)), wide.new_tensor(most))
        return inside + whole * one, wide.new_full(scale.shape, one)
    ordered = wide.sort(dim=-1).values
    low, high = ordered[:, :1], ordered[:, -1:]
    if not asymmetric:
        return wide.clone(), torch.maximum(-low, high) / 127
    high = torch.where(low == high, torch.relu(high), high)
    low = torch.where(low == ordered[:, -1:], -torch.relu(-low), low)
    step = high / 255 - low / 255
    spread = torch.where(high == low, torch.ones_like(low), high - low)
    zero = torch.special.round(-128 - low * 255 / spread)
    inside = torch.minimum(torch.maximum(wide, (LOWEST - zero) * step), (HIGHEST - zero) * step)
    return inside + zero * step, step, zero.int()


def _uneven(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """x with these limits in every row, to avoid zero points half-way between two integers."""
    x = x.clamp(low, high)
    x[:, 0], x[:, -1] = low, high
    return x


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    def number(value: float, *shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, value, dtype=of, device=source.device)

    yield Sample("1 token", (source.normal(1, 64), None, None, None))
    yield Sample("0 tokens", (source.normal(0, 64), None, None, None))
    uneven = source.normal(16, 5 * 67)
    uneven *= torch.arange(1, 17, device=source.device).to(source.dtype)[:, None] / 8
    yield Sample("16 tokens, odd hidden size", (uneven, None, None, None))
    zeros = source.normal(5, 96)
    zeros[2], zeros[3] = 0.0, zeros[3] * 1e-3
    yield Sample("a row of zeros, and a small one", (zeros, None, None, None))
    rows = source.normal(12, 3 * 64)[::2, 64:128]
    yield Sample("strided rows", (rows, None, None, None))
    x = source.normal(7, 130)
    yield Sample("static", (x, number(0.021, 1), None, None))
    yield Sample("static, saturating on both sides", (x, number(0.0057), None, None))
    yield Sample("static, beyond 32767 steps", (x * 128, number(1e-3), None, None))
    yield Sample("static, azp", (x, number(0.019, 1), number(-31, 1, of=torch.int32), None))
    yield Sample("static, 0 tokens", (x[:0], number(0.02, 1), None, None))
    both = _uneven(source.normal(7, 130, scale=0.7), -1.0, 2.0)
    both[0], both[4] = -both[0], both[4] * 8
    yield Sample("asymmetric", (both, None, None, True))
    above = _uneven(source.normal(4, 64).abs() + 4, 4.0, 9.0)[::2]
    yield Sample("asymmetric, all above 0, every other row", (above, None, None, True))
    yield Sample("features apart", (source.normal(6, 64, 2)[..., 0], None, None, None))
    broken = source.normal(5, 96)
    broken[1, 7], broken[3, 40] = math.nan, math.inf
    yield Sample("NaN and infinity", (broken, None, None, None), open_rows=(1, 3))
    equal = _uneven(source.normal(6, 96, scale=0.7), -1.0, 2.0)
    equal[1], equal[2], equal[3], equal[4] = 1.5, -1.5, 0.0, 1e-3
    yield Sample("asymmetric, rows of equal numbers", (equal, None, None, True), kit_only=True)


def _served(source: Source, sizes: ModelSizes, hidden: int) -> Iterator[Sample]:
    import torch

    most = peak(source.dtype)
    for tokens in sizes.tokens:
        x = activations(source, tokens, hidden, scale=1.0)
        size = f"{tokens} x {hidden}{', large' * source.large}"
        yield Sample(size, (x, None, None, None))
        step = most / 100 if source.large else 0.03
        scale = torch.full((1,), step, dtype=torch.float32, device=source.device)
        yield Sample(f"{size}, static", (x, scale, None, None))
        if inner := sizes.intermediate:  # the input of the MLP's second product
            x = activations(source, tokens, inner, scale=1.0)
            yield Sample(f"{tokens} x {inner}{', large' * source.large}", (x, None, None, None))


def _fake(x: torch.Tensor, scale: torch.Tensor | None, azp: Any, asymmetric: bool | None) -> Any:
    import torch

    value = x.new_empty(x.shape, dtype=torch.int8)
    steps = x.new_empty((x.shape[0], 1) if scale is None else scale.shape, dtype=torch.float32)
    zero = x.new_empty((x.shape[0], 1), dtype=torch.int32)
    return (value, steps, zero) if asymmetric else (value, steps)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    x, one = good["x"], good["x"].new_ones(1).float()
    yield "3-D, one scale", {"x": x[None], "scale": one}
    yield "no feature", {"x": x[:, :0]}
    yield "no feature, one scale", {"x": x[:, :0], "scale": one}
    yield "no feature, asymmetric", {"x": x[:, :0], "asymmetric": True}
    yield "a scale for each token", {"scale": x[:, :1].float()}
    yield "a scale in double", {"scale": one.double()}
    yield "a zero point without scale", {"azp": one.int()}
    yield "a zero point in float32", {"scale": one, "azp": one}
    yield "asymmetric is False", {"asymmetric": False}
    yield "asymmetric with a scale", {"scale": one, "asymmetric": True}


SPEC = contract(
    quant_int8,
    {
        "x": tensor("tokens, hidden", where="hidden >= 1"),
        "scale": tensor("", "float32").optional(),
        "azp": tensor("", "int32", where="scale is not None").optional(),
        "asymmetric": flag("value and scale is None").optional(),
    },
    _fake,
    bad=_bad,
    variants=(
        Variant("", "(Tensor x, Tensor? scale=None, Tensor? azp=None) -> (Tensor, Tensor)"),
        Variant(
            "asymmetric",
            "(Tensor x, Tensor? scale=None, Tensor? azp=None, bool? asymmetric=None)"
            " -> (Tensor, Tensor, Tensor)",
        ),
    ),
    group="quant",
    samples=_samples,
    served=_served,
    second_form=_by_limits,
    dtypes=("float32", "float16", "bfloat16"),
    tolerances={
        "float32": Tolerance(
            1e-6,
            1e-12,
            "a maximum is exact, and its division one rounding of 2^-24 (two if multiplied by "
            "1/127); atol because some kernels use 1e-10 / 127 for a row of zeros",
        )
    },
    outputs=(QuantisedPair(steps=0.5), Exact()),
    whole_batch=True,  # all rows share a given scale
    ignores_repeats=True,  # repeats do not change it
)
