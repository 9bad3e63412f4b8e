"""Projections with too few digits: mistakes that are none in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_fl.contracts import ModelSizes, Sample, contracts

SPEC = contracts()["linear"]
CPU = torch.device("cpu")
Op = Callable[..., torch.Tensor]


def all_within(op: Op, samples: list[Sample], dtype: torch.dtype) -> bool:
    bound = SPEC.tolerance(dtype)

    def passes(sample: Sample) -> bool:
        got, want = op(*sample.args).to(dtype).double(), SPEC.oracle(*sample.args)
        atol = bound.atol * sample.scale
        return torch.allclose(got, want, rtol=bound.rtol, atol=atol, equal_nan=True)

    return all(map(passes, samples))


def rounded_at_each_step(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    """One sum for all features, in x's dtype."""
    result = x.new_zeros(x.shape[0], weight.shape[0])
    for one, factor in zip(x.t(), weight.t(), strict=True):
        result += one[:, None] * factor
    return result if bias is None else result + bias


def in_tf32(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    """Factors of 10 bits, as tensor cores take them from float32."""

    def cut(values: torch.Tensor) -> torch.Tensor:
        return (values.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)

    return SPEC.oracle(cut(x), cut(weight), bias)


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (torch.float32, in_tf32),
        (torch.float16, rounded_at_each_step),
        (torch.bfloat16, rounded_at_each_step),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_too_few_digits_are_seen(dtype: torch.dtype, wrong: Op) -> None:
    assert not all_within(wrong, list(SPEC.samples(dtype, CPU)), dtype)
    sizes = ModelSizes(hidden=512, heads=4, kv_heads=2, head_size=64, tokens=(4,))
    assert not all_within(wrong, list(SPEC.served(sizes, dtype, CPU, True)), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("large", [False, True])
def test_sums_of_parts_may_be_rounded(dtype: torch.dtype, large: bool) -> None:
    """Libraries split the features and add what each part gives, in x's dtype."""

    def in_four_parts(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        some = -(-x.shape[1] // 4)
        parts = zip(x.split(some, dim=1), weight.split(some, dim=1), strict=True)
        result = sum(SPEC.oracle(*part).to(dtype) for part in parts)
        return result if bias is None else result + bias  # type: ignore[return-value]

    sizes = ModelSizes(hidden=4096, heads=2, kv_heads=1, head_size=64, tokens=(300,))
    samples = list(SPEC.samples(dtype, CPU)) + list(SPEC.served(sizes, dtype, CPU, large))
    assert all_within(in_four_parts, samples, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_values_stay_within_the_dtype(dtype: torch.dtype) -> None:
    more = {"dense_intermediate": 11008, "router_experts": 64}
    sizes = ModelSizes(hidden=4096, heads=8, kv_heads=2, head_size=128, tokens=(300,), more=more)
    for sample in SPEC.served(sizes, dtype, CPU, True):
        result = SPEC.oracle(*sample.args)
        assert 2 * sample.scale < result.abs().max() < torch.finfo(dtype).max / 2, sample.name


@pytest.mark.parametrize("large", [False, True])
def test_projections_of_a_served_model(large: bool) -> None:
    """Each of a layer's, once; those that a configuration does not tell are left out."""

    def names(**sizes: Any) -> list[str]:
        found = ModelSizes(tokens=(3,), **sizes)
        return [s.name for s in SPEC.served(found, torch.bfloat16, CPU, large)]

    heads = {"heads": 6, "kv_heads": 2, "head_size": 16}
    more = {"dense_intermediate": 80, "router_experts": 8}
    every = ["96 -> 160", "96 -> 96", "80 -> 96", "96 -> 8"]
    assert names() == names(**heads) == names(more=more) == []
    expected = [f"3 x {name}{', large' * large}" for name in every]
    assert names(hidden=96, **heads, more=more) == expected
    assert names(hidden=96, heads=6, head_size=16, more={"router_experts": None}) == expected[1:2]
    assert names(hidden=96, more={"dense_intermediate": 72.0})[0].startswith("3 x 96 -> 144")


@pytest.mark.parametrize(
    "op", ["linear", "linear_fp8", "linear_gelu_tanh_and_mul", "linear_silu_and_mul"]
)
@pytest.mark.parametrize(
    "tokens",
    [range(1, 2), range(2, 17), range(17, 33), range(33, 65), range(65, 1000)],
    ids=lambda tokens: f"{tokens[0]}-{tokens[-1]}",
)
def test_sizes_beyond_whole_tiles_are_tried_at_every_number_of_tokens(
    op: str, tokens: range
) -> None:
    spec = contracts()[op]
    calls = [s.args for s in spec.samples(torch.bfloat16, CPU) if len(s.args[0]) in tokens]
    assert any(x.shape[1] % 16 for x, *_ in calls)
    assert any(spec.oracle(*args).shape[1] % 32 for args in calls)
