"""joint_cos_sin: when cos and sin are one cache, and when not."""

from __future__ import annotations

import pytest
import torch

from vllm_fl_ops.contracts.cos_sin import joint_cos_sin

CACHE = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("rows", [slice(None), slice(2, 7), slice(3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_comes_back_without_a_copy(rows: slice, dtype: torch.dtype) -> None:
    cache = CACHE[rows].to(dtype)
    cos, sin = cache.chunk(2, dim=-1)
    for joint in (joint_cos_sin(cos, sin), joint_cos_sin(cache[:, :8], cache[:, 8:])):
        assert joint is not None and torch.equal(joint, cache)
        assert joint.data_ptr() == cos.data_ptr() and joint.is_contiguous()
    with torch.inference_mode():
        assert joint_cos_sin(*cache.chunk(2, dim=-1)) is not None


NONE: dict[str, Pair] = {
    "two tensors": (CACHE[:, :8].clone(), CACHE[:, 8:].clone()),
    "swapped": (CACHE[:, 8:], CACHE[:, :8]),
    "the same": (CACHE[:, :8], CACHE[:, :8]),
    "a gap between": (CACHE[:, :4], CACHE[:, 8:12]),
    "padded rows": (CACHE[:, :4], CACHE[:, 4:8]),
    "every other row": (CACHE[::2, :8], CACHE[::2, 8:]),
    "interleaved": (CACHE[:, ::2], CACHE[:, 1::2]),
    "other rows": (CACHE[:5, :8], CACHE[5:, 8:]),
    "other width": (CACHE[:, :8], CACHE[:, 8:12]),
    "other dtype": (CACHE[:, :8], CACHE[:, 8:].half()),
    "no rows": (CACHE[:0, :8], CACHE[:0, 8:]),
    "one dimension": (CACHE[0, :8], CACHE[0, 8:]),
}


@pytest.mark.parametrize("pair", NONE.values(), ids=NONE)
def test_no_cache(pair: Pair) -> None:
    assert joint_cos_sin(*pair) is None
