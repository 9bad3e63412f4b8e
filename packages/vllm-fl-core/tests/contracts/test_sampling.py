"""Random inputs: private, repeatable, and cheap for a large batch; positions like in vLLM."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.contracts.sampling import UNIQUE_ROWS, Source, positions

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


def drawing() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


@pytest.mark.parametrize("length", [1, 40, 131072])
@pytest.mark.parametrize("count", [0, 1, 17, 2048])
def test_positions_stay_within_the_model(count: int, length: int) -> None:
    with torch.device("meta"):  # they are drawn on the CPU, on any default device
        at = positions(count, length, drawing())
    assert (at.shape, at.dtype, at.device.type) == ((count,), torch.int64, "cpu")
    assert at.numel() == 0 or 0 <= int(at.min()) <= int(at.max()) < length


def test_positions_run_jump_back_and_run_again() -> None:
    at = positions(251, 4096, drawing())
    steps = at[1:] - at[:-1]
    assert int((steps == 1).sum()) > 100  # prompts
    assert int((steps < 0).sum()) > 5  # prompts in sequence
    assert int((steps == 0).sum()) >= 2  # sequences that decode in step
    assert {0, 2047, 2048, 4095} <= set(at.tolist())
