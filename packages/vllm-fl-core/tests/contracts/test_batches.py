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
    at = positions(count, length, drawing())
    assert at.shape == (count,)
    assert at.dtype == torch.int64
    assert not count or 0 <= int(at.min()) <= int(at.max()) < length


def test_positions_run_jump_back_and_run_again() -> None:
    at = positions(251, 4096, drawing())
    steps = at[1:] - at[:-1]
    assert int((steps == 1).sum()) > 100  # prompts
    assert int((steps < 0).sum()) > 5  # prompts in sequence
    assert int((steps == 0).sum()) >= 2  # sequences that decode in step
    assert {0, 2047, 2048, 4095} <= set(at.tolist())


def test_positions_are_drawn_on_the_cpu_on_any_default_device() -> None:
    with torch.device("meta"):
        assert {positions(n, 64, drawing()).device.type for n in (0, 40)} == {"cpu"}
