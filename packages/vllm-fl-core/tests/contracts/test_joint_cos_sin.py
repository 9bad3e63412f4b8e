"""joint_cos_sin: when cos and sin are one cache, and when not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vllm_fl.contracts.cos_sin import joint_cos_sin

CACHE = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize(
    ("cache", "halves"),
    [
        pytest.param(CACHE, CACHE.chunk(2, dim=-1), id="chunks"),
        pytest.param(CACHE, (CACHE[:, :8], CACHE[:, 8:]), id="slices"),
        pytest.param(CACHE[2:7], CACHE[2:7].chunk(2, dim=-1), id="rows within a cache"),
        pytest.param(CACHE[3:4], CACHE[3:4].chunk(2, dim=-1), id="one row"),
        pytest.param(CACHE.bfloat16(), None, id="bf16"),
        pytest.param(CACHE.view(80, 2), None, id="one pair"),
    ],
)
def test_the_cache_comes_back_without_a_copy(cache: torch.Tensor, halves: Pair | None) -> None:
    cos, sin = halves or cache.chunk(2, dim=-1)
    joint = joint_cos_sin(cos, sin)
    assert joint is not None
    assert torch.equal(joint, cache)
    assert joint.data_ptr() == cos.data_ptr()
    assert joint.is_contiguous()
    with torch.inference_mode():
        assert joint_cos_sin(*cache.chunk(2, dim=-1)) is not None


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(lambda: (CACHE[:, :8].clone(), CACHE[:, 8:].clone()), id="two tensors"),
        pytest.param(lambda: (CACHE[:, 8:], CACHE[:, :8]), id="swapped"),
        pytest.param(lambda: (CACHE[:, :8], CACHE[:, :8]), id="the same"),
        pytest.param(lambda: (CACHE[:, :4], CACHE[:, 8:12]), id="a gap between"),
        pytest.param(lambda: (CACHE[:, :4], CACHE[:, 4:8]), id="padded rows"),
        pytest.param(lambda: (CACHE[::2, :8], CACHE[::2, 8:]), id="every other row"),
        pytest.param(lambda: (CACHE[:, ::2], CACHE[:, 1::2]), id="interleaved"),
        pytest.param(lambda: (CACHE[:5, :8], CACHE[5:, 8:]), id="other rows"),
        pytest.param(lambda: (CACHE[:, :8], CACHE[:, 8:12]), id="other width"),
        pytest.param(lambda: (CACHE[:, :8], CACHE[:, 8:].half()), id="other dtype"),
        pytest.param(lambda: (CACHE[:, :8], CACHE[:, 8:].to("meta")), id="other device"),
        pytest.param(lambda: (CACHE[:0, :8], CACHE[:0, 8:]), id="no rows"),
        pytest.param(lambda: (CACHE[0, :8], CACHE[0, 8:]), id="one dimension"),
    ],
)
def test_no_cache(pair: Callable[[], Pair]) -> None:
    assert joint_cos_sin(*pair()) is None
