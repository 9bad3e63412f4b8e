"""A projection of fp8 activations by fp8 weights, each with scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import tensor, word
from vllm_fl.contracts.sampling import UNIQUE_ROWS, Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract
from .linear import LINEAR_SHAPES, by_features, product, projections, repeated

if TYPE_CHECKING:
    import torch

MOST = 448.0
"""The largest number of float8_e4m3fn."""


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (weight * weight_scale).T + bias, rounded once.

    Args:
        x: (tokens, in_features), float8_e4m3fn, of any layout; in_features is at least 1. NaN
            affects only its row.
        weight: (out_features, in_features), float8_e4m3fn, on x's device, of any layout.
        x_scale: float32, finite, on x's device, of any layout: (tokens, 1), or one number for all
            tokens, as (1,) or ().
        weight_scale: like x_scale, for output features: (out_features, 1), or one number.
        out_dtype: float16 or bfloat16, the dtype of the result.
        bias: (out_features,), of out_dtype, on x's device, of any layout, or None for 0.

    Returns:
        (tokens, out_features), contiguous, of out_dtype, on x's device. The inputs are not
        modified.

    Raises:
        CallError: an argument violates this contract.

    Source: vLLM's `cutlass_scaled_mm`, with scales for a tensor, a token or an output channel;
    `torch._scaled_mm` with row-wise scales.
    """
    result = product(x.double() * x_scale.double(), weight, weight_scale.double())
    return result if bias is None else result + bias.double()


def _scaled_last(*call: Any) -> torch.Tensor:
    """Sum over blocks of input features, and apply the scales last."""
    x, weight, x_scale, weight_scale, _, bias = call
    scales = weight_scale.double().reshape(1, -1) * x_scale.double()
    result: torch.Tensor = by_features(x, weight) * scales
    return result if bias is None else result + bias.double()


def _eight_bits(values: torch.Tensor, *, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 values, scale) of float32 values: scale is (rows, 1) with `by_row`, else (1,)."""
    import torch

    size = values.abs()
    if by_row:
        largest = size.amax(1, keepdim=True)
    else:
        largest = (size.amax() if size.numel() else size.new_zeros(())).reshape(1)
    scale = (largest / MOST).clamp(min=1 / (MOST * 512))
    return (values / scale).to(torch.float8_e4m3fn), scale


def _rows(source: Source, count: int, features: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers in float32, with rows of different magnitudes."""
    import torch

    return _uneven(source.normal(count, features, scale=scale, dtype=torch.float32))


def _uneven(rows: torch.Tensor) -> torch.Tensor:
    """Multiply rows by 1, 1/2, 1/4, 1, ..., to make their scales differ."""
    import torch

    power = torch.arange(len(rows), device=rows.device) % 3
    return rows * 0.5 ** power.to(rows.dtype)[:, None]


def _call(
    source: Source, values: torch.Tensor, out: int, *, token: bool, channel: bool, bias: bool
) -> tuple[Any, ...]:
    """A call for float32 activations, with a scale per token (or one) and per channel (or one)."""
    x, x_scale = _eight_bits(values, by_row=token)
    features = values.shape[1]
    weight = _rows(source, out, features, features**-0.5)
    return _of(x, x_scale, *_eight_bits(weight, by_row=channel), source, bias)


def _of(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    source: Source,
    bias: bool,
) -> tuple[Any, ...]:
    added = source.normal(len(weight)) if bias else None
    return x, weight, x_scale, weight_scale, str(source.dtype).removeprefix("torch."), added


def _samples(source: Source) -> Iterator[Sample]:
    import torch

    for name, tokens, features, out in (*LINEAR_SHAPES, ("many features", 40, 4096, 96)):
        values = _rows(source, tokens, features)
        for token, channel, bias in ((True, True, True), (True, False, False), (False,) * 3):
            how = f"{'each token' if token else 'one'} and {'each channel' if channel else 'one'}"
            args = _call(source, values, out, token=token, channel=channel, bias=bias)
            yield Sample(f"{name}, scales {how}{', bias' * bias}", args)

    def call(values: torch.Tensor, out: int = 37, **more: bool) -> tuple[Any, ...]:
        return _call(source, values, out, **{"token": True, "channel": True, "bias": True, **more})

    values = _rows(source, 6, 192)
    yield Sample("scales one and each channel, bias", call(values, 64, token=False))
    args = call(values, 64, token=False, channel=False)
    yield Sample("scales without dimensions", (*args[:2], args[2][0], args[3][0], *args[4:]))

    x, weight, *more = call(_rows(source, 6, 192 + 32), 64)
    yield Sample("slice of a wider buffer", (x[:, 16:208], weight[:, 16:208], *more))
    x, weight, x_scale, *more = call(_rows(source, 8, 192), 64)
    yield Sample("every other row", (x[::2], weight, x_scale[::2], *more))
    x, weight, *more = call(_rows(source, 6, 128))
    yield Sample("features apart", (x[:, ::2], weight[:, ::2], *more))
    x, weight, *more = call(_rows(source, 5, 192), 64)
    turned = (of.t().contiguous().t() for of in (x, weight))
    yield Sample("transposed in memory", (*turned, *more))
    x, weight, x_scale, weight_scale, *more = call(_rows(source, 5, 192), 64)
    apart = (of.expand(-1, 2).contiguous()[:, :1] for of in (x_scale, weight_scale))
    yield Sample("scales apart in memory", (x, weight, *apart, *more))
    args = call(_rows(source, 5, 192), 64)
    yield Sample("bias apart in memory", (*args[:-1], source.normal(64, 2)[:, 0]))

    yield Sample("every number 448 or -448", call(_uneven(_rows(source, 6, 256).sign())))
    values = _rows(source, 5, 256)
    values[2] = 0.0
    yield Sample("a row of zeros", call(values))
    x, *more = call(_rows(source, 5, 256))
    bits = x.view(torch.uint8)
    bits[1, 7], bits[3, 200] = 0x7F, 0xFF  # both encodings of NaN
    yield Sample("NaN", (x, *more))
    yield Sample("as many tokens as output features", call(_rows(source, 32, 192), 32))
    most = peak(source.dtype) / (8 if source.dtype == torch.float16 else 1)  # results are finite
    yield Sample("results as large as they get", call(_rows(source, 6, 256, most), 64), most)
    x, weight = (source.normal(rows, 256, scale=2**-8, dtype=torch.float32) for rows in (6, 64))
    x_scale, weight_scale = (x.new_full((1,), 2.0**power) for power in (8, 4))
    x, weight = (of.to(torch.float8_e4m3fn) for of in (x, weight))
    args = _of(x, x_scale, weight, weight_scale, source, bias=True)
    yield Sample("numbers below fp8's normal ones", args)


def _served(source: Source, sizes: ModelSizes) -> Iterator[Sample]:
    most = peak(source.dtype)
    # Scales of an unquantised checkpoint that vLLM quantises; of a checkpoint with a scale per
    # tensor; and of a checkpoint with a scale per channel.
    kinds = (
        ("each token and one", True, False),
        ("one and one", False, False),
        ("each token and each channel", True, True),
    )
    for tokens in sizes.tokens:
        layers = projections(sizes, router=False)
        for (features, out, bias), (how, token, channel) in zip(layers, cycle(kinds), strict=False):
            values, scale = _rows(source, tokens, features), 1.0
            if source.large:  # as for `linear`
                values = source.spiked(tokens, features, scale=most / 32, peak=most)
                values, scale = _uneven(values.float()), most / 8
            columns, few = source.rows(out), min(out, UNIQUE_ROWS)
            args = _call(source, values, few, token=token, channel=channel, bias=bias)
            if bias and source.large:
                args = (*args[:-1], args[-1] * (scale / 4))
            name = f"{tokens} x {features} -> {out}, scales {how}"
            name = f"{name}{', bias' * bias}{', large' * source.large}"
            yield repeated(Sample(name, args, scale), columns, 1, 3, 5)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    import torch

    x, scale, bias = good["x"], good["x_scale"], good["bias"]
    other = "float16" if good["out_dtype"] == "bfloat16" else "bfloat16"
    yield "another fp8", {name: good[name].to(torch.float8_e5m2) for name in ("x", "weight")}
    yield "weight is 1-D", {"weight": good["weight"][0]}
    yield "scales of groups of features", {"x_scale": scale.expand(-1, 2)}
    yield "a scale for each token without a dimension", {"x_scale": scale[:, 0]}
    yield "no scale", {"weight_scale": scale[:0, 0]}
    yield "out_dtype is float32", {"out_dtype": "float32", "bias": None}
    yield "out_dtype is not a string", {"out_dtype": torch.bfloat16}
    yield "bias of another dtype than the result", {"out_dtype": other}
    yield "bias of a row for each token", {"bias": bias.expand(len(x), -1)}


_FOURTEEN_BITS = (
    "Hopper's tensor cores add fp8 products with about 14 bits (DeepSeek-V3 Technical Report, "
    "arXiv:2412.19437, section 3.5.2) in vLLM's CUTLASS kernels (FP8FastAccum): a sum of "
    "magnitude 1 loses up to 0.01 in 4096 features and 0.025 in 14336, a larger sum more"
)

SPEC = contract(
    linear_fp8,
    {
        "x": tensor("tokens, in_features", "float8_e4m3fn", where="in_features >= 1"),
        "weight": tensor("out_features, in_features", "float8_e4m3fn"),
        "x_scale": tensor("tokens, 1", "float32").or_one(),
        "weight_scale": tensor("out_features, 1", "float32").or_one(),
        "out_dtype": word("bfloat16", "float16"),
        "bias": tensor("out_features", "out_dtype").optional(),
    },
    (tensor("tokens, out_features", "out_dtype"),),
    bad=_bad,
    samples=_samples,
    served=_served,
    read_whole=frozenset({"weight", "weight_scale"}),
    second_form=_scaled_last,
    tolerances={
        "float16": Tolerance(1e-2, 2e-2, _FOURTEEN_BITS),
        "bfloat16": Tolerance(
            1.6e-2,
            3e-2,
            "4 roundings of 2^-8; atol for rounding the sum before the bias (half of 2^-5 for a "
            f"sum of 4 to 8), and because {_FOURTEEN_BITS}",
        ),
    },
)
