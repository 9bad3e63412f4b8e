"""`linear` and related products: samples detect mistakes and accept legitimate roundings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from of_acme import acme
from telling import by_dtype
from torch import Tensor
from torch.nn.functional import gelu, silu

from vllm_fl.contracts import ModelSizes, Sample
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_verify.oracle import magnitudes
from vllm_fl_verify.verification import compare

CPU = torch.device("cpu")
FP8, SILU, GELU = "linear_fp8", "linear_silu_and_mul", "linear_gelu_tanh_and_mul"
OPS = ("linear", FP8, GELU, SILU)
SERVED = ModelSizes(
    hidden=512, heads=4, kv_heads=2, head_size=64, tokens=(4,), more={"dense_intermediate": 384}
)
LARGER = ModelSizes(
    hidden=4096, heads=2, kv_heads=1, head_size=64, tokens=(300,), more={"dense_intermediate": 2048}
)

Form = Callable[..., Tensor]
Change = Callable[[Tensor], Tensor]
Fewer = Callable[[int], int]
by_tanh = partial(gelu, approximate="tanh")


def found(op: str, samples: Iterable[Sample], dtype: torch.dtype, form: Form) -> dict[str, str]:
    """Sample -> the error of a form's result."""
    spec = known_contracts().contracts[op]

    def fn(*args: Any) -> Tensor:
        return form(*args).to(getattr(torch, args[4]) if op == FP8 else args[0].dtype)

    impl = acme(op, fn)
    results = {sample.name: compare(impl, spec, sample, dtype) for sample in samples}
    return {name: result.reason for name, result in results.items() if result.status != "ok"}


def served(op: str, dtype: torch.dtype, large: bool, sizes: ModelSizes = SERVED) -> list[Sample]:
    return list(known_contracts().contracts[op].served(sizes, dtype, CPU, large))


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
) -> Tensor:
    """Correct by default; each option is a mistake."""
    if swaps_square and weight.shape[0] == weight.shape[1]:
        weight = weight.t()
    some = features(x.shape[1])
    y = x[rows(len(x)), :some].double() @ weight[:, :some].double().t()
    gate, up = halves(y).chunk(2, dim=-1)
    return act(gate) * of_up(up)


def overflowing(gate: Tensor) -> Tensor:
    power = (1.5957691216 * (gate + 0.044715 * gate**3)).float().exp()
    return (gate * power / (1 + power)).double()


OF_SILU: dict[str, dict[str, Any]] = {
    "right": {},
    "gate and up swapped": {"halves": lambda y: y.roll(y.shape[1] // 2, 1)},
    "sigmoid": {"act": torch.sigmoid},
    "no activation": {"act": lambda gate: gate},
    "silu of up, too": {"of_up": silu},
    "gates of at most 88": {"act": lambda gate: silu(gate.clamp(max=88))},
    "sigmoids of at least 2^-8": {"act": lambda gate: gate * gate.sigmoid().clamp(min=2**-8)},
    "0 for gates below -5": {"act": lambda gate: silu(gate) * (gate > -5)},
    "up of at most 100": {"of_up": lambda up: up.clamp(-100, 100)},
    "the last feature of an odd number left out": {
        "features": lambda n: n - (n % 2 if n > 1 else 0)
    },
    "the first 64 tokens' for all": {"rows": lambda n: torch.arange(n) % 64},
    "a square weight that is not transposed": {"swaps_square": True},
}
OF_GELU: dict[str, Change] = {
    "right": by_tanh,
    "quick gelu": lambda gate: gate * (1.702 * gate).sigmoid(),
    "NaN for far gates": overflowing,
}


def of_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_dtype: str,
    bias: Tensor | None = None,
    *,
    read: Change = Tensor.float,
    of_tokens: Change = lambda scale: scale,
    of_channels: Change = lambda scale: scale,
    swaps_square: bool = False,
    last: Change = lambda result: result,
    skips: Fewer = lambda features: 0,
) -> Tensor:
    """Correct by default; each option is a mistake."""
    features = x.shape[1] - skips(x.shape[1])
    result = read(x)[:, :features] @ read(weight)[:, :features].t()
    added: Any = 0 if bias is None else bias.float()
    if swaps_square and len(x) == len(weight):
        x_scale, weight_scale = weight_scale, x_scale
    scale = of_tokens(x_scale) * of_channels(weight_scale).t()
    return last(result * scale + added)


def normal_alone(numbers: Tensor) -> Tensor:
    read = numbers.float()
    return read.where(~(read.abs() < torch.finfo(numbers.dtype).smallest_normal), 0.0)


def first(scale: Tensor) -> Tensor:
    return scale[:1] if scale.ndim else scale


OF_FP8: dict[str, dict[str, Any]] = {
    "right": {},
    "the first token's scale for all": {"of_tokens": first},
    "the first channel's scale for all": {"of_channels": first},
    "results of at most 4000": {"last": lambda result: result.clamp(-4000, 4000)},
    "the scales changed for each other where there are as many": {"swaps_square": True},
    "reads numbers below the normal ones as 0": {"read": normal_alone},
    "NaN as 480": {"read": lambda of: of.float().nan_to_num(480.0)},
    "the last feature of an odd number left out": {"skips": lambda features: features % 2},
}
WRONG: dict[tuple[str, str], Form] = {
    **{(SILU, what): partial(product, **options) for what, options in OF_SILU.items()},
    **{(GELU, what): partial(product, act=act) for what, act in OF_GELU.items()},
    **{(FP8, what): partial(of_fp8, **options) for what, options in OF_FP8.items()},
}


@by_dtype((op, what) for op, what in WRONG)
def test_samples_tell_a_wrong_kernel(op: str, what: str, dtype: torch.dtype) -> None:
    wrong = found(op, known_contracts().contracts[op].samples(dtype, CPU), dtype, WRONG[op, what])
    is_right = what == "right" or (what, dtype) == ("0 for gates below -5", torch.bfloat16)
    assert bool(wrong) != is_right, wrong


@by_dtype([(FP8,), (SILU,)])
@pytest.mark.parametrize("large", [False, True])
def test_calls_of_a_model_tell_a_wrong_kernel(op: str, large: bool, dtype: torch.dtype) -> None:
    whats = {
        FP8: ("the first token's scale for all", "the first channel's scale for all"),
        SILU: ("gate and up swapped", "sigmoid", "no activation", "silu of up, too"),
    }
    for what in ("right", *whats[op]):
        wrong = found(op, served(op, dtype, large), dtype, WRONG[op, what])
        assert bool(wrong) != (what == "right"), what


@pytest.mark.parametrize("large", [False, True])
def test_large_values_tell_who_computes_in_float16(large: bool) -> None:
    samples = served(SILU, torch.bfloat16, large)
    wrong = found(SILU, samples, torch.bfloat16, lambda *args: product(*args).half())
    assert bool(wrong) is large


def test_float32_tells_gelu_by_the_error_function() -> None:
    """16-bit dtypes do not: the two differ by 5e-4 at most."""
    for dtype in (torch.float32, torch.bfloat16):
        samples = known_contracts().contracts[GELU].samples(dtype, CPU)
        wrong = found(GELU, samples, dtype, partial(product, act=gelu))
        assert bool(wrong) is (dtype == torch.float32)


def silu_of(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return silu(gate) * up


def as_one(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=-1)
    return gate * torch.exp2(gate * -1.4426950).add(1).reciprocal() * up


def rounded_four_times(x: Tensor, weight: Tensor) -> Tensor:
    return silu_of((x.float() @ weight.float().t()).to(x.dtype))


def in_four_parts(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """Libraries split the features and sum the partial results in x's dtype."""
    some = -(-x.shape[1] // 4)
    parts = zip(x.split(some, dim=1), weight.split(some, dim=1), strict=True)
    y: Any = sum((part.double() @ factors.double().t()).to(x.dtype) for part, factors in parts)
    return y if bias is None else y + bias


def by_sigmoid(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate**3))


ALLOWED: dict[str, tuple[str, Form]] = {
    "linear in four parts": ("linear", in_four_parts),
    "silu, rounded once": (SILU, as_one),
    "silu, rounded four times": (SILU, rounded_four_times),
    "silu in four parts": (SILU, lambda x, weight: silu_of(in_four_parts(x, weight))),
    "gelu by a sigmoid": (GELU, partial(product, act=by_sigmoid)),
}


@by_dtype((op, name) for name, (op, _) in ALLOWED.items())
def test_roundings_that_libraries_have_are_right(op: str, what: str, dtype: torch.dtype) -> None:
    sizes = SERVED if op == GELU else LARGER
    every = [served(op, dtype, large, sizes) for large in (False, True)]
    samples = [*known_contracts().contracts[op].samples(dtype, CPU), *every[0], *every[1]]
    assert not found(op, samples, dtype, ALLOWED[what][1])


@by_dtype([("fused_experts",)])
def test_experts_whose_every_step_is_rounded_are_right(op: str, dtype: torch.dtype) -> None:
    def rounded(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, *_: Any) -> Any:
        total = torch.zeros_like(x, dtype=torch.double)
        for expert, taken in itertools.product(range(len(w13)), range(ids.shape[1])):
            token = ids[:, taken] == expert
            inner = silu_of((x[token].double() @ w13[expert].double().t()).to(dtype))
            result = (inner.double() @ w2[expert].double().t()).to(dtype)
            total[token] += (result * weights[token, taken, None]).to(dtype)
        return total

    more = {"experts": 8, "experts_per_token": 2, "expert_intermediate": 384}
    sizes = ModelSizes(hidden=4096, tokens=(256,), more=more)
    every = [*served(op, dtype, False, sizes), *served(op, dtype, True, sizes)]
    assert not found(op, every, dtype, rounded)


def rounded_at_each_step(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """One sum over all features, in x's dtype."""
    result = x.new_zeros(x.shape[0], weight.shape[0])
    for one, factor in zip(x.t(), weight.t(), strict=True):
        result += one[:, None] * factor
    return result if bias is None else result + bias


def in_tf32(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """Factors of 10 bits, as tensor cores use for float32."""
    x, weight = (
        (of.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32).double()
        for of in (x, weight)
    )
    return x @ weight.t() if bias is None else x @ weight.t() + bias


@by_dtype([("linear",), (SILU,)])
def test_too_few_digits_are_seen(op: str, dtype: torch.dtype) -> None:
    few = in_tf32 if dtype == torch.float32 else rounded_at_each_step
    form = few if op == "linear" else lambda x, weight: silu_of(few(x, weight))
    assert found(op, known_contracts().contracts[op].samples(dtype, CPU), dtype, form)
    assert found(op, served(op, dtype, True), dtype, form)


def in_bits(count: int) -> Form:
    """Products summed as Hopper's tensor cores do: 32 of them and the previous sum at a time, each
    truncated to this many bits below the largest one."""

    def form(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        total = torch.zeros(len(x), len(weight), dtype=torch.float64)
        pairs = x.double().split(32, dim=1), weight.double().split(32, dim=1)
        for some, factors in zip(*pairs, strict=True):
            terms = torch.cat((some[:, None] * factors, total[..., None]), dim=-1)
            largest = terms.abs().amax(-1, keepdim=True).clamp(min=2.0**-30)
            step = 2.0 ** (largest.log2().floor() - (count - 1))
            total = ((terms / step).trunc() * step).sum(-1)
        x_scale, weight_scale, _, bias = rest
        result = total * x_scale.double() * weight_scale.double().t()
        return result if bias is None else result + bias

    return form


@by_dtype([(FP8,)])
@pytest.mark.parametrize("large", [False, True])
def test_fourteen_bits_of_a_sum_are_enough_and_ten_are_not(
    op: str, large: bool, dtype: torch.dtype
) -> None:
    more = {"dense_intermediate": 14336, "router_experts": 8}
    samples = served(op, dtype, large, ModelSizes(hidden=64, tokens=(40,), more=more))[-1:]
    assert not found(op, samples, dtype, in_bits(14))
    assert found(op, samples, dtype, in_bits(10))


@by_dtype([("linear",), (FP8,), (SILU,)])
def test_large_values_stay_within_the_dtype(op: str, dtype: torch.dtype) -> None:
    more = {"dense_intermediate": 11008, "router_experts": 64}
    sizes = ModelSizes(hidden=4096, heads=8, kv_heads=2, head_size=128, tokens=(300,), more=more)
    for sample in served(op, dtype, True, sizes):
        result = known_contracts().contracts[op].oracle(*sample.args)
        assert 2 * sample.scale < result.abs().max() < torch.finfo(dtype).max / 2, sample.name
        if op == SILU and dtype != torch.float16:
            assert result.abs().max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("large", [False, True])
def test_projections_of_a_served_model(large: bool) -> None:
    """Each projection of a layer once; those missing in a configuration are skipped."""

    def names(op: str = "linear", **sizes: Any) -> list[str]:
        found = ModelSizes(tokens=(3,), **sizes)
        return [s.name.partition(", ")[0][4:] for s in served(op, torch.bfloat16, large, found)]

    heads = {"heads": 6, "kv_heads": 2, "head_size": 16}
    more = {"dense_intermediate": 80, "router_experts": 8}
    every = ["96 -> 160", "96 -> 96", "80 -> 96", "96 -> 8"]
    assert names() == names(**heads) == names(more=more) == []
    assert names(hidden=96, **heads, more=more) == every
    assert names(hidden=96, heads=6, head_size=16, more={"router_experts": None}) == every[1:2]
    assert names(hidden=96, more={"dense_intermediate": 72.0})[0].startswith("96 -> 144")
    assert "96 -> 8" not in names(FP8, hidden=96, **heads, more=more), "a router is not quantised"
    assert names(SILU, hidden=96, more=more) == ["96 -> 2*80"]
    unknown = {"dense_intermediate": None}
    assert names(SILU, hidden=96, more={"dense_intermediate": 0}) == []
    assert names(SILU, hidden=96, more=unknown) == names(SILU, more=more) == []


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "tokens",
    [range(1, 2), range(2, 17), range(17, 33), range(33, 65), range(65, 1000)],
    ids=lambda tokens: f"{tokens[0]}-{tokens[-1]}",
)
def test_sizes_beyond_whole_tiles_are_tried_at_every_number_of_tokens(
    op: str, tokens: range
) -> None:
    spec = known_contracts().contracts[op]
    calls = [s.args for s in spec.samples(torch.bfloat16, CPU) if len(s.args[0]) in tokens]
    assert any(x.shape[1] % 16 for x, *_ in calls)
    assert any(spec.oracle(*args).shape[1] % 32 for args in calls)


def test_a_scale_is_a_row_for_each_token_or_one_number() -> None:
    spec = known_contracts().contracts[FP8]
    sample = next(s for s in spec.samples(torch.float16, CPU) if s.args[2].ndim == 1)
    given = spec.named(sample.args)
    assert [*spec.with_rows(sample.args)] == ["x"]
    each = torch.ones(len(given["x"]), 1)
    rows = tuple({**given, "x_scale": each}.values())
    assert [*spec.with_rows(rows)] == ["x", "x_scale"]
    halved = spec.with_changed_rows(rows, lambda arg: arg[: len(arg) // 2])
    assert spec.check(*halved) is None and spec.tokens(halved) == len(each) // 2


@pytest.mark.parametrize("largest", [3.0, 1e5])
def test_the_room_of_a_served_call_goes_by_its_scaled_numbers(largest: float) -> None:
    """Quantised values reach 448 in each row, so a tolerance from them would accept zeros."""
    values = torch.linspace(-largest, largest, 64).repeat(2, 1)
    for scale in (torch.full((2, 1), largest / 448), torch.tensor(largest / 448)):
        x, weight = ((of / of.max() * 448).to(torch.float8_e4m3fn) for of in (values, values))
        found = magnitudes(
            known_contracts().contracts[FP8], (x, weight, scale, torch.ones(1), "bfloat16", None)
        )
        assert torch.equal(torch.as_tensor(found).round(), torch.full((2,), largest).double())
