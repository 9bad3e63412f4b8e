"""A product and its activation in one: mistakes that samples tell, and roundings that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from vllm_fl.contracts import ModelSizes, Sample, contracts
from vllm_fl.engine.verification import compare
from vllm_fl.plugins.types import BackendImplKind, OpImpl

SPEC = contracts()["linear_silu_and_mul"]
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SERVED = ModelSizes(hidden=512, tokens=(4,), more={"dense_intermediate": 384})
LARGER = ModelSizes(hidden=4096, tokens=(300,), more={"dense_intermediate": 2048})

Change = Callable[[Tensor], Tensor]
Fewer = Callable[[int], int]


def product(
    x: Tensor,
    weight: Tensor,
    *,
    rows: Callable[[int], Tensor] = torch.arange,
    features: Fewer = lambda count: count,
    swaps_square: bool = False,
    halves: Change = lambda y: y,
    act: Change = silu,
    of_up: Change = lambda up: up,
    outputs: Fewer = lambda count: count,
) -> Tensor:
    """Right by default; each option is a mistake."""
    if swaps_square and weight.shape[0] == weight.shape[1]:
        weight = weight.t()
    some = features(x.shape[1])
    y = x[rows(len(x)), :some].double() @ weight[:, :some].double().t()
    gate, up = halves(y).chunk(2, dim=-1)
    result = act(gate) * of_up(up)
    result[:, outputs(result.shape[1]) :] = 0
    return result.to(x.dtype)


def overflowing(gate: Tensor) -> Tensor:
    power = gate.float().exp()
    return (gate * power / (1 + power)).double()


WRONG: dict[str, dict[str, Any]] = {
    "right": {},
    "gate and up swapped": {"halves": lambda y: y.roll(y.shape[1] // 2, 1)},
    "gate and up by turns": {"halves": lambda y: torch.cat((y[:, ::2], y[:, 1::2]), dim=1)},
    "gate twice": {"halves": lambda y: y.chunk(2, dim=1)[0].repeat(1, 2)},
    "sigmoid": {"act": torch.sigmoid},
    "gelu": {"act": gelu},
    "quick gelu": {"act": lambda gate: gate * (1.702 * gate).sigmoid()},
    "relu": {"act": torch.relu},
    "no activation": {"act": lambda gate: gate},
    "the gate without its sign": {"act": lambda gate: silu(gate.abs())},
    "up without its sign": {"of_up": torch.abs},
    "silu of up, too": {"of_up": silu},
    "NaN for far gates": {"act": overflowing},
    "gates of at most 88": {"act": lambda gate: silu(gate.clamp(max=88))},
    "sigmoids of at least 2^-8": {"act": lambda gate: gate * gate.sigmoid().clamp(min=2**-8)},
    "0 for gates below -5": {"act": lambda gate: silu(gate) * (gate > -5)},
    "up of at most 100": {"of_up": lambda up: up.clamp(-100, 100)},
    "the last feature of an odd number left out": {
        "features": lambda n: n - (n % 2 if n > 1 else 0)
    },
    "the last block of features left out": {"features": lambda n: n // 128 * 128 or n},
    "output features beyond whole tiles left out": {"outputs": lambda n: n // 32 * 32},
    "the last output feature left out": {"outputs": lambda n: n - n % 2},
    "the first token's for all": {"rows": lambda n: torch.zeros(n, dtype=torch.long)},
    "the first 64 tokens' for all": {"rows": lambda n: torch.arange(n) % 64},
    "a square weight that is not transposed": {"swaps_square": True},
}


def found(
    samples: Iterable[Sample], dtype: torch.dtype, op: Callable[..., Tensor]
) -> dict[str, str]:
    """Sample -> what is wrong with a form's result."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return op(x, weight).to(x.dtype)

    impl = OpImpl(SPEC.name, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")
    results = {s.name: compare(impl, SPEC, s, dtype) for s in samples}
    return {name: result.reason for name, result in results.items() if result.status != "ok"}


@DTYPES
@pytest.mark.parametrize(("what", "options"), WRONG.items(), ids=WRONG)
def test_samples_tell_a_wrong_kernel(
    what: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    wrong = found(SPEC.samples(dtype, CPU), dtype, lambda *args: product(*args, **options))
    is_right = what == "right" or (what, dtype) == ("0 for gates below -5", torch.bfloat16)
    assert bool(wrong) != is_right, wrong


@DTYPES
@pytest.mark.parametrize("large", [False, True])
def test_calls_of_a_model_tell_a_wrong_activation(dtype: torch.dtype, large: bool) -> None:
    def seen(**options: Any) -> bool:
        samples = SPEC.served(SERVED, dtype, CPU, large)
        return bool(found(samples, dtype, lambda *args: product(*args, **options)))

    assert not seen()
    for what in ("gate and up swapped", "sigmoid", "no activation", "silu of up, too"):
        assert seen(**WRONG[what]), what


@pytest.mark.parametrize("large", [False, True])
def test_large_values_tell_who_computes_in_float16(large: bool) -> None:
    samples = SPEC.served(SERVED, torch.bfloat16, CPU, large)
    assert bool(found(samples, torch.bfloat16, lambda *args: product(*args).half())) is large


def every(dtype: torch.dtype) -> list[Sample]:
    """The contract's samples, and those of a model with many features."""
    served = (SPEC.served(LARGER, dtype, CPU, large) for large in (False, True))
    return [*SPEC.samples(dtype, CPU), *(sample for samples in served for sample in samples)]


def rounded_once(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=-1)
    return gate * torch.exp2(gate * -1.4426950).add(1).reciprocal() * up


def rounded_four_times(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x.float() @ weight.float().t()).to(x.dtype).chunk(2, dim=-1)
    return silu(gate) * up


def in_four_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Libraries split the features and add what each part gives, in x's dtype."""
    some = -(-x.shape[1] // 4)
    parts = zip(x.split(some, dim=1), weight.split(some, dim=1), strict=True)
    y = sum((part.double() @ factors.double().t()).to(x.dtype) for part, factors in parts)
    gate, up = y.chunk(2, dim=-1)  # type: ignore[union-attr]
    return silu(gate) * up


@DTYPES
@pytest.mark.parametrize("op", [rounded_once, rounded_four_times, in_four_parts])
def test_products_and_silu_may_be_rounded_or_not(
    op: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    assert not found(every(dtype), dtype, op)


def rounded_at_each_step(x: Tensor, weight: Tensor) -> Tensor:
    """One sum for all features, in x's dtype."""
    y = x.new_zeros(x.shape[0], weight.shape[0])
    for one, factor in zip(x.t(), weight.t(), strict=True):
        y += one[:, None] * factor
    gate, up = y.chunk(2, dim=-1)
    return silu(gate) * up


def in_tf32(x: Tensor, weight: Tensor) -> Tensor:
    """Factors of 10 bits, as tensor cores take them from float32."""

    def cut(values: Tensor) -> Tensor:
        return (values.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)

    return SPEC.oracle(cut(x), cut(weight))


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, in_tf32),
        (torch.float16, rounded_at_each_step),
        (torch.bfloat16, rounded_at_each_step),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_too_few_digits_are_seen(dtype: torch.dtype, op: Callable[..., Tensor]) -> None:
    assert found(SPEC.samples(dtype, CPU), dtype, op)
    assert found(SPEC.served(SERVED, dtype, CPU, True), dtype, op)


@DTYPES
def test_large_values_stay_within_the_dtype(dtype: torch.dtype) -> None:
    sizes = ModelSizes(hidden=4096, tokens=(300,), more={"dense_intermediate": 11008})
    (sample,) = SPEC.served(sizes, dtype, CPU, True)
    result = SPEC.oracle(*sample.args)
    assert 2 * sample.scale < result.abs().max() < torch.finfo(dtype).max / 2
    assert dtype == torch.float16 or result.abs().max() > torch.finfo(torch.float16).max


def test_calls_of_a_served_model() -> None:
    def names(**sizes: Any) -> list[str]:
        model = ModelSizes(tokens=(1, 3), **sizes)
        return [sample.name for sample in SPEC.served(model, torch.bfloat16, CPU, False)]

    assert names(hidden=96, more={"dense_intermediate": 80}) == ["1 x 96 -> 2*80", "3 x 96 -> 2*80"]
    untold = {"dense_intermediate": None}
    assert names(hidden=96, more={"dense_intermediate": 0}) == names(hidden=96, more=untold) == []
    assert names(more={"dense_intermediate": 80}) == []
