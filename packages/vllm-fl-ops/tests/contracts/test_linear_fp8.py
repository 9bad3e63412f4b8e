"""Projections of fp8: mistakes that samples tell, digits that they do not, and vLLM's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fl.contracts import ModelSizes, Sample, contracts
from vllm_fl.engine.verification import compare
from vllm_fl.engine.wanted import magnitudes
from vllm_fl.plugins.types import BackendImplKind, OpImpl

SPEC = contracts()["linear_fp8"]
CPU = torch.device("cpu")
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
SERVED = ModelSizes(
    hidden=256, heads=4, kv_heads=2, head_size=64, tokens=(1, 20), more={"dense_intermediate": 320}
)


def product(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_dtype: str,
    bias: Tensor | None = None,
    *,
    read: Callable[[Tensor], Tensor] = Tensor.float,
    of_tokens: Callable[[Tensor], Tensor] = lambda scale: scale,
    of_channels: Callable[[Tensor], Tensor] = lambda scale: scale,
    bias_first: bool = False,
    scaled_bias: bool = False,
    by_output: bool = False,
    swaps_square: bool = False,
    last: Callable[[Tensor], Tensor] = lambda result: result,
    skips: Callable[[int], int] = lambda features: 0,
) -> Tensor:
    """Right by default; each option is a mistake."""
    features = x.shape[1] - skips(x.shape[1])
    result = read(x)[:, :features] @ read(weight)[:, :features].t()
    added: Any = 0 if bias is None else bias.float()
    if swaps_square and len(x) == len(weight):
        x_scale, weight_scale = weight_scale, x_scale
    scale = of_tokens(x_scale) * of_channels(weight_scale).t()
    if by_output:
        scale = torch.ones_like(result) * of_channels(weight_scale).t()
        scale *= x_scale.expand(len(x), 1)[torch.arange(len(weight)) % max(len(x), 1)].t()
    if bias_first:
        result = (result + added) * scale
    else:
        result = result * scale + added * (of_channels(weight_scale).t() if scaled_bias else 1)
    return last(result).to(getattr(torch, out_dtype))


def as_e5m2(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.float8_e5m2).float()


def normal_alone(numbers: Tensor) -> Tensor:
    read = numbers.float()
    return read.where(~(read.abs() < torch.finfo(numbers.dtype).smallest_normal), 0.0)


def first(scale: Tensor) -> Tensor:
    return scale[:1] if scale.ndim else scale


def first_token(scale: Tensor) -> Tensor:
    """The scales beyond the first token's are taken for 1."""
    return scale.index_fill(0, torch.arange(1, len(scale)), 1.0) if scale.ndim > 1 else scale


WRONG: dict[str, dict[str, Any]] = {
    "right": {},
    "the scale of the first token alone": {"of_tokens": first_token},
    "the first token's scale for all": {"of_tokens": first},
    "the first channel's scale for all": {"of_channels": first},
    "no scale of the weight": {"of_channels": torch.ones_like},
    "a token's scale for the output feature of its number": {"by_output": True},
    "the bias before the scales": {"bias_first": True},
    "the bias times the channel's scale": {"scaled_bias": True},
    "the result through fp8": {"last": lambda result: result.to(torch.float8_e4m3fn).float()},
    "results of at most 4000": {"last": lambda result: result.clamp(-4000, 4000)},
    "the scales changed for each other where there are as many": {"swaps_square": True},
    "reads e5m2": {"read": as_e5m2},
    "reads numbers below the normal ones as 0": {"read": normal_alone},
    "NaN as 480": {"read": lambda of: of.float().nan_to_num(480.0)},
    "the last feature of an odd number left out": {"skips": lambda features: features % 2},
}


def found(samples: Any, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, str]:
    """Sample -> what is wrong with a form's result."""

    def fn(*args: Any) -> Any:
        return product(*args, **options)

    fn.__signature__ = SPEC.signature  # type: ignore[attr-defined]
    impl = OpImpl(SPEC.name, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")
    results = {s.name: compare(impl, SPEC, s, dtype) for s in samples}
    return {name: result.reason for name, result in results.items() if result.status != "ok"}


@HALVES
@pytest.mark.parametrize(("what", "options"), WRONG.items(), ids=WRONG)
def test_samples_tell_a_wrong_kernel(
    what: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    wrong = found(SPEC.samples(dtype, CPU), dtype, options)
    assert bool(wrong) == (what != "right"), wrong


@HALVES
@pytest.mark.parametrize("large", [False, True])
def test_calls_of_a_model_tell_wrong_scales(dtype: torch.dtype, large: bool) -> None:
    def seen(**options: Any) -> bool:
        return bool(found(SPEC.served(SERVED, dtype, CPU, large), dtype, options))

    assert not seen()
    assert seen(of_tokens=first) and seen(of_channels=first)


def in_bits(count: int) -> Callable[..., Tensor]:
    """Products as Hopper's tensor cores add them, 32 of them and the sum before at a time: each is
    cut off at so many bits below the largest one."""

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


@HALVES
@pytest.mark.parametrize("large", [False, True])
def test_fourteen_bits_of_a_sum_are_enough_and_ten_are_not(dtype: torch.dtype, large: bool) -> None:
    sizes = ModelSizes(
        hidden=64, tokens=(40,), more={"dense_intermediate": 14336, "router_experts": 8}
    )
    samples = list(SPEC.served(sizes, dtype, CPU, large))[-1:]
    assert all_within(in_bits(14), samples, dtype) and not all_within(in_bits(10), samples, dtype)


def all_within(op: Callable[..., Tensor], samples: list[Sample], dtype: torch.dtype) -> bool:
    bound = SPEC.tolerance(dtype)

    def passes(sample: Sample) -> bool:
        got, want = op(*sample.args).to(dtype).double(), SPEC.oracle(*sample.args)
        atol = bound.atol * sample.scale
        return torch.allclose(got, want, rtol=bound.rtol, atol=atol, equal_nan=True)

    return all(map(passes, samples))


@HALVES
def test_large_values_stay_within_the_dtype(dtype: torch.dtype) -> None:
    more = {"dense_intermediate": 11008, "router_experts": 64}
    sizes = ModelSizes(hidden=4096, heads=8, kv_heads=2, head_size=128, tokens=(300,), more=more)
    samples = list(SPEC.served(sizes, dtype, CPU, True))
    assert [sample.name.partition(", scales")[0] for sample in samples] == [
        "300 x 4096 -> 1536",
        "300 x 1024 -> 4096",
        "300 x 4096 -> 22016",
        "300 x 11008 -> 4096",
    ], "a router is not quantised"
    for sample in samples:
        result = SPEC.oracle(*sample.args)
        assert 2 * sample.scale < result.abs().max() < torch.finfo(dtype).max / 2, sample.name


def test_a_scale_is_a_row_for_each_token_or_one_number() -> None:
    sample = next(s for s in SPEC.samples(torch.float16, CPU) if s.args[2].ndim == 1)
    given = SPEC.named(sample.args)
    assert [*SPEC.with_rows(sample.args)] == ["x"]
    each = torch.ones(len(given["x"]), 1)
    rows = tuple({**given, "x_scale": each}.values())
    assert [*SPEC.with_rows(rows)] == ["x", "x_scale"]
    halved = SPEC.with_changed_rows(rows, lambda arg: arg[: len(arg) // 2])
    assert SPEC.check(*halved) is None and SPEC.tokens(halved) == len(each) // 2


@pytest.mark.parametrize("largest", [3.0, 1e5])
def test_the_room_of_a_served_call_goes_by_its_scaled_numbers(largest: float) -> None:
    """Each row has numbers up to 448, whatever its values are: a result of zeros would pass."""
    values = torch.linspace(-largest, largest, 64).repeat(2, 1)
    for scale in (torch.full((2, 1), largest / 448), torch.tensor(largest / 448)):
        x, weight = ((of / of.max() * 448).to(torch.float8_e4m3fn) for of in (values, values))
        found = magnitudes(SPEC, (x, weight, scale, torch.ones(1), "bfloat16", None))
        assert torch.equal(torch.as_tensor(found).round(), torch.full((2,), largest).double())
