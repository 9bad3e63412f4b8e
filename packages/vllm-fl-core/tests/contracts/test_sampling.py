"""Random inputs: private, repeatable, and cheap for a large batch."""

from __future__ import annotations

import torch

from vllm_fl.contracts.sampling import UNIQUE_ROWS, Source

CPU = torch.device("cpu")


def test_draws_follow_each_other_and_repeat_from_the_start() -> None:
    one, two = Source(torch.float32, CPU), Source(torch.float32, CPU)
    first = one.normal(3, 4)
    assert not torch.equal(first, one.normal(3, 4))
    assert torch.equal(first, two.normal(3, 4))
    assert torch.equal(Source(torch.bfloat16, CPU).normal(3, 4), first.bfloat16())


def test_a_large_tensor_has_its_rows_again_without_a_period() -> None:
    x = Source(torch.float32, CPU).normal(9 * UNIQUE_ROWS, 2)
    assert len(torch.unique(x[:UNIQUE_ROWS], dim=0)) == UNIQUE_ROWS
    assert len(torch.unique(x, dim=0)) == UNIQUE_ROWS
    for period in (UNIQUE_ROWS, 256, 512, 1024):
        assert int((x[period:] == x[:-period]).all(1).sum()) < len(x) // 50, period
