"""A linear projection of each token's features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import tensor
from vllm_fl.contracts.sampling import UNIQUE_ROWS, Source, peak
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract

if TYPE_CHECKING:
    import torch

LINEAR_SHAPES = (
    ("16 tokens", 16, 256, 96),
    ("1 token", 1, 1024, 768),
    ("1 token, odd sizes beyond one block", 1, 2063, 259),
    ("2 tokens", 2, 512, 512),
    ("17 tokens, odd sizes", 17, 129, 259),
    ("33 tokens", 33, 192, 37),
    ("40 tokens, odd sizes", 40, 129, 37),
    ("65 tokens", 65, 64, 64),
    ("65 tokens, odd sizes", 65, 129, 37),
    ("300 tokens", 300, 192, 64),
    ("0 tokens", 0, 256, 96),
    ("1 feature", 5, 1, 259),
    ("1 output feature", 7, 2063, 1),
)
"""(name, tokens, in_features, out_features) of samples, around sizes at which kernels change.

The first is small, because checks that need only one call use it.
"""

ROWS_AT_ONCE = 256
"""Number of rows of a weight that the oracle converts to float64 at a time."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias.

    Args:
        x: (tokens, in_features), float32, float16 or bfloat16, of any layout, such as a strided
            view of a wider projection. in_features is at least 1. NaN and infinity affect only
            their row.
        weight: (out_features, in_features), of x's dtype and device, of any layout.
        bias: (out_features,), of x's dtype and device, of any layout, or None for 0.

    Returns:
        (tokens, out_features), contiguous, of x's dtype and device. The inputs are not modified.

    Raises:
        CallError: an argument violates this contract.

    Source: `torch.nn.functional.linear`; vLLM's layers with `UnquantizedLinearMethod`.
    """
    result = product(x, weight)
    return result if bias is None else result + bias.double()


def product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ (weight * scale).T in float64, with a scale per row or one for all rows.

    Rows are converted a few at a time, to stay in a processor's cache. Converting a large weight at
    once takes two to five times as long on a host.
    """
    import torch

    x, results = x.double(), []
    for number, some in enumerate(weight.split(ROWS_AT_ONCE)):
        rows = some.double()
        if scale is not None:
            rows *= scale[number * ROWS_AT_ONCE :][:ROWS_AT_ONCE] if scale.ndim > 1 else scale
        results.append(x @ rows.t())
    return torch.cat(results, dim=1)


def by_features(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, summed over blocks of input features."""
    result = x.new_zeros(x.shape[0], weight.shape[0]).double()
    if bias is not None:
        result += bias.double()
    for some, factors in zip(x.split(64, dim=1), weight.split(64, dim=1), strict=True):
        result += (some.double()[:, None, :] * factors.double()[None]).sum(dim=-1)
    return result


def _samples(source: Source) -> Iterator[Sample]:
    for name, tokens, features, out in (
        *LINEAR_SHAPES,
        ("odd sizes beyond one block", 3, 2063, 37),
        ("many features", 40, 2184, 96),
    ):
        yield from _both(name, source, source.normal(tokens, features), out)

    for name, x, out in layouts(source):
        yield from _both(name, source, x, out)

    x, bias = source.normal(5, 192), source.normal(64)
    weight = source.normal(64, 192 + 32, scale=192**-0.5)[:, 16 : 16 + 192]
    yield Sample("weight out of a wider matrix", (x, weight, bias))
    weight = source.normal(192, 64, scale=192**-0.5).t()
    yield Sample("weight transposed", (x, weight, bias))
    weight = source.normal(192, 192, scale=192**-0.5).t()
    yield Sample("square weight, transposed", (x, weight, None))
    weight = source.normal(64, 192, scale=192**-0.5)
    yield Sample("bias apart in memory", (x, weight, source.normal(64, 2)[:, 0]))

    yield from _both("NaN and infinity", source, broken_rows(source), 37)


def layouts(source: Source) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield (name, x, out_features) of samples with other memory layouts of x."""
    wide = source.normal(6, 129 + 32)
    yield "slice of a wider buffer", wide[:, 16 : 16 + 129], 37
    yield "every other row", source.normal(8, 192)[::2], 64
    yield "features apart", source.normal(6, 64, 2)[..., 0], 37
    yield "x transposed", source.normal(129, 5).t(), 37


def broken_rows(source: Source) -> torch.Tensor:
    """x with a NaN in row 1, and an infinity in row 3."""
    x = source.normal(5, 256)
    x[1, 7], x[3, 200] = float("nan"), float("inf")
    return x


def _both(name: str, source: Source, x: torch.Tensor, out: int) -> Iterator[Sample]:
    features = x.shape[1]
    weight = source.normal(out, features, scale=features**-0.5)
    yield Sample(name, (x, weight, source.normal(out)))
    yield Sample(f"{name}, no bias", (x.clone(), weight, None))


def _served(source: Source, sizes: ModelSizes) -> Iterator[Sample]:
    most = peak(source.dtype)
    for tokens in sizes.tokens:
        for features, out, biased in projections(sizes):
            columns, few = source.rows(out), min(out, UNIQUE_ROWS)
            weight = source.normal(few, features, scale=features**-0.5)
            x, scale = source.normal(tokens, features), 1.0
            if source.large:
                # One feature in 61 is `most`: sums have the magnitude most / 8, and the largest
                # is within fp16's 65504.
                x, scale = source.spiked(tokens, features, scale=most / 32, peak=most), most / 8
            # The effect of a bias of magnitude 1 would vanish in such sums.
            bias = source.normal(few, scale=scale / 4 if source.large else 1.0) if biased else None
            name = f"{tokens} x {features} -> {out}{', bias' * biased}{', large' * source.large}"
            yield repeated(Sample(name, (x, weight, bias), scale), columns, 1, 2)


def repeated(few: Sample, columns: torch.Tensor, *places: int, parts: int = 1) -> Sample:
    """Return a call with weights that repeat the rows of a smaller call, to derive its results from
    it.

    Args:
        few: the smaller call.
        columns: for each output feature, the number of the equal feature in the smaller call.
        places: positions of the arguments that have a row per output feature. Such an argument is
            unchanged if it is None, or one number for all rows.
        parts: the number of parts of these arguments, each with a row per output feature.
    """
    import torch

    def rows(arg: torch.Tensor | None) -> torch.Tensor | None:
        if arg is None or arg.numel() == 1:
            return arg
        plain = arg.view(torch.uint8) if arg.itemsize == 1 else arg  # no device can index every fp8
        taken: torch.Tensor = plain.unflatten(0, (parts, -1)).index_select(1, columns).flatten(0, 1)
        return taken.view(arg.dtype)

    args = tuple(rows(arg) if at in places else arg for at, arg in enumerate(few.args))
    return replace(few, args=args, repeats=(few.args, columns))


def projections(sizes: ModelSizes, router: bool = True) -> Iterator[tuple[int, int, bool]]:
    """Yield (in_features, out_features, has a bias) of a layer's projections, without duplicates.
    Omits projections of unknown size.

    Args:
        sizes: the model's sizes.
        router: whether to include the router of experts, which checkpoints do not quantise.
    """
    hidden, size = sizes.hidden, sizes.head_size
    dense, experts = (sizes.more.get(name) for name in ("dense_intermediate", "router_experts"))
    biased = int(sizes.more.get("biased") or 0)
    found: list[tuple[float | None, float | None, int]] = []
    if sizes.heads is not None and size is not None:
        if sizes.kv_heads is not None:
            found.append((hidden, (sizes.heads + 2 * sizes.kv_heads) * size, biased & 1))
        found.append((sizes.heads * size, hidden, biased & 2))
    if dense:
        found += [(hidden, 2 * dense, biased & 4), (dense, hidden, biased & 4)]
    if router:
        found.append((hidden, experts, 0))
    for features, out, bias in dict.fromkeys(found):
        if features and out:  # known, and not 0
            yield int(features), int(out), bool(bias)


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    x, weight, bias = good.values()
    yield "all of integers", {name: value.long() for name, value in good.items()}
    yield "weight is 1-D, no bias", {"weight": weight[0], "bias": None}
    yield "bias of a number for each token", {"bias": x[:, :1]}
    yield "bias of a row for each token", {"bias": bias.expand(len(x), -1)}


SPEC = contract(
    linear,
    {
        "x": tensor("tokens, in_features", where="in_features >= 1"),
        "weight": tensor("out_features, in_features", "x"),
        "bias": tensor("out_features", "x").optional(),
    },
    (tensor("tokens, out_features"),),
    bad=_bad,
    samples=_samples,
    served=_served,
    read_whole=frozenset({"weight"}),
    second_form=by_features,
    tolerances={
        "float32": Tolerance(
            1e-5,
            2e-5,
            "thousands of products summed in any order: as many roundings of 2^-24, of partial "
            "sums of magnitude 1; TF32's 2^-11 is too coarse",
        ),
        "float16": Tolerance(
            2e-3,
            3e-3,
            "4 roundings of 2^-11; atol because partial sums, and the sum before the bias, may be "
            "rounded to float16: half of 2^-8 for a sum of 4 to 8",
        ),
        "bfloat16": Tolerance(
            1.6e-2,
            2e-2,
            "4 roundings of 2^-8, vLLM's bf16 default; atol as for float16: half of 2^-5 for a "
            "sum of 4 to 8",
        ),
    },
)
