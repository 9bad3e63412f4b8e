"""Batches of tokens as vLLM makes them."""

from __future__ import annotations

import pytest
import torch

from vllm_fl_verify import batches


def drawing() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


@pytest.mark.parametrize("order", ["consecutive", "drawn", "repeated", "alike"])
@pytest.mark.parametrize("count", [0, 1, 251, 16384])
def test_a_batch_has_so_many_rows_of_the_pool(order: batches.Order, count: int) -> None:
    found = batches.rows(count, batches.POOL, drawing(), order)
    assert found.shape == (count,)
    assert not count or 0 <= int(found.min()) <= int(found.max()) < batches.POOL


@pytest.mark.parametrize("order", ["consecutive", "drawn", "repeated"])
def test_rows_a_power_of_two_apart_are_not_the_same(order: batches.Order) -> None:
    found = batches.rows(16384, batches.POOL, drawing(), order)
    for power in (64, 128, 256, 512, 1024, 4096, 8192):
        assert float((found[power:] == found[:-power]).double().mean()) < 0.05


def test_repeated_rows_stand_beside_themselves() -> None:
    found = batches.rows(8, batches.POOL, drawing(), "repeated")
    assert bool((found[1:] == found[:-1]).any())
    assert bool((found[1:] != found[:-1]).any())
    assert found[0] == found[1] != found[2], "as where two requests of three decode in step"


def test_all_is_drawn_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        made = [
            *(batches.rows(600, 251, drawing(), o) for o in ("consecutive", "drawn", "repeated")),
            batches.rows(7, 251, drawing(), "alike"),
            batches.tokens(40, 64, drawing()),
        ]
    assert {each.device.type for each in made} == {"cpu"}
