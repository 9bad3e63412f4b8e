"""Batches of tokens as vLLM makes them."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.contracts import batches


def drawing(seed: int = 0) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


@pytest.mark.parametrize("order", ["standing", "drawn", "repeated", "alike"])
@pytest.mark.parametrize("count", [0, 1, 251, 16384])
def test_a_batch_has_so_many_rows_of_the_pool(order: batches.Order, count: int) -> None:
    found = batches.rows(count, batches.POOL, drawing(), order)
    assert found.shape == (count,)
    assert not count or 0 <= int(found.min()) <= int(found.max()) < batches.POOL


@pytest.mark.parametrize("order", ["standing", "drawn", "repeated"])
def test_rows_a_power_of_two_apart_are_not_the_same(order: batches.Order) -> None:
    found = batches.rows(16384, batches.POOL, drawing(), order)
    for power in (64, 128, 256, 512, 1024, 4096, 8192):
        assert float((found[power:] == found[:-power]).double().mean()) < 0.05


def test_repeated_rows_stand_beside_themselves() -> None:
    found = batches.rows(8, batches.POOL, drawing(), "repeated")
    assert bool((found[1:] == found[:-1]).any())
    assert bool((found[1:] != found[:-1]).any())
    assert found[0] == found[1] != found[2], "as where two requests of three decode in step"


@pytest.mark.parametrize("length", [1, 40, 131072])
@pytest.mark.parametrize("count", [0, 1, 17, 2048])
def test_positions_stay_within_the_model(count: int, length: int) -> None:
    at = batches.positions(count, length, drawing())
    assert at.shape == (count,)
    assert at.dtype == torch.int64
    assert not count or 0 <= int(at.min()) <= int(at.max()) < length


def test_positions_run_jump_back_and_run_again() -> None:
    at = batches.positions(batches.POOL, 4096, drawing())
    steps = at[1:] - at[:-1]
    assert int((steps == 1).sum()) > 100  # prompts
    assert int((steps < 0).sum()) > 5  # one behind another
    assert int((steps == 0).sum()) >= 2  # sequences that decode in step
    assert {0, 2047, 2048, 4095} <= set(at.tolist())


def test_all_is_drawn_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        made = [
            *(batches.rows(600, 251, drawing(), o) for o in ("standing", "drawn", "repeated")),
            batches.rows(7, 251, drawing(), "alike"),
            batches.positions(40, 64, drawing()),
            batches.positions(0, 64, drawing()),
            batches.tokens(40, 64, drawing()),
        ]
    assert {each.device.type for each in made} == {"cpu"}
