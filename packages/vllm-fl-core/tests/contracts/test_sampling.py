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


def test_a_large_tensor_repeats_a_prime_number_of_rows() -> None:
    x = Source(torch.float32, CPU).normal(2 * UNIQUE_ROWS + 3, 2)
    assert torch.equal(x[:UNIQUE_ROWS], x[UNIQUE_ROWS : 2 * UNIQUE_ROWS])
    assert len(torch.unique(x, dim=0)) == UNIQUE_ROWS
    assert all(UNIQUE_ROWS % n for n in range(2, UNIQUE_ROWS))
