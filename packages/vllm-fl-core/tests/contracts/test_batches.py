"""Positions of a batch, like in vLLM."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.contracts.sampling import positions


def drawing() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


@pytest.mark.parametrize("length", [1, 40, 131072])
@pytest.mark.parametrize("count", [0, 1, 17, 2048])
def test_positions_stay_within_the_model(count: int, length: int) -> None:
    with torch.device("meta"):  # they are drawn on the CPU, on any default device
        at = positions(count, length, drawing())
    assert (at.shape, at.dtype, at.device.type) == ((count,), torch.int64, "cpu")
    assert not count or 0 <= int(at.min()) <= int(at.max()) < length


def test_positions_run_jump_back_and_run_again() -> None:
    at = positions(251, 4096, drawing())
    steps = at[1:] - at[:-1]
    assert int((steps == 1).sum()) > 100  # prompts
    assert int((steps < 0).sum()) > 5  # prompts in sequence
    assert int((steps == 0).sum()) >= 2  # sequences that decode in step
    assert {0, 2047, 2048, 4095} <= set(at.tolist())
