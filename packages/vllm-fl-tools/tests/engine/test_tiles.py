"""The search of tiles for vLLM's experts, by times that a rule gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from vllm_fl_tools.engine.tiles import (
    BETWEEN,
    KEPT,
    LADDERS,
    OWN,
    SEARCHED,
    Search,
    Tiles,
    label,
    neighbours,
)
from vllm_fl_tools.engine.timing import Measured

BASE: Tiles = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "SPLIT_K": 1,
    "num_warps": 4,
    "num_stages": 4,
}

Rule = Callable[[int, Tiles], float]


class Kernel:
    """Measures by a rule: (tokens, tiles) -> µs; a negative time is a wrong result."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.now = rule, 0.0
        self.tried: dict[int, list[Tiles]] = {}
        self.order: list[int] = []

    def search(self, seconds: float = 1e9) -> Search:
        return Search(lambda tokens: BASE, self.measure, seconds, lambda: self.now)

    def measure(self, tokens: int, tiles: Sequence[Tiles]) -> Measured:
        self.now += 1.0
        self.tried.setdefault(tokens, []).extend(tiles)
        self.order.append(tokens)
        found = Measured(tokens, OWN, thorough=False)
        times = {OWN: self.rule(tokens, BASE)} | {label(t): self.rule(tokens, t) for t in tiles}
        found.rejected = {name: "wrong" for name, us in times.items() if us < 0}
        found.finals = {name: [us] * 11 for name, us in times.items() if us > 0}
        return found


def test_a_neighbour_differs_by_one_step_of_one_part() -> None:
    found = [(part, tiles) for part in LADDERS for tiles in neighbours(BASE, part)]
    assert all(sum(tiles[n] != BASE[n] for n in BASE) == 1 for _, tiles in found)
    assert all(tiles[part] != BASE[part] for part, tiles in found)
    assert {tiles["BLOCK_SIZE_N"] for part, tiles in found if part == "BLOCK_SIZE_N"} == {32, 128}
    assert {tiles["BLOCK_SIZE_M"] for part, tiles in found if part == "BLOCK_SIZE_M"} == {32}


def test_steps_that_gain_are_taken_together() -> None:
    def rule(tokens: int, tiles: Tiles) -> float:
        wide, deep = tiles["BLOCK_SIZE_N"] == 128, tiles["num_stages"] == 5
        return 100.0 * (0.8 if wide else 1.0) * (0.8 if deep else 1.0)

    found = Kernel(rule).search().run(1)
    assert [*found] == [1]
    best = found[1]
    assert best.tiles == {**BASE, "BLOCK_SIZE_N": 128, "num_stages": 5}
    assert (best.us, best.own_us, best.ratio) == pytest.approx((64, 100, 1.5625))


def test_two_steps_of_one_part() -> None:
    found = Kernel(lambda n, tiles: 100.0 / tiles["BLOCK_SIZE_N"]).search().run(1)
    assert found[1].tiles == {**BASE, "BLOCK_SIZE_N": 256}


def test_where_nothing_is_faster_vllms_own_stays_at_every_size() -> None:
    kernel = Kernel(lambda n, tiles: 100.0)
    found = kernel.search().run(64)
    assert {n: one.tiles for n, one in found.items()} == dict.fromkeys(sorted(found), BASE)
    assert {*found} == {n for n in (*SEARCHED, *BETWEEN) if n <= 64}
    assert all(one.ratio is None for one in found.values())
    assert {*kernel.tried} == {n for n in SEARCHED if n <= 64}, "between them nobody won"


def test_what_gives_wrong_results_is_never_taken() -> None:
    def rule(tokens: int, tiles: Tiles) -> float:
        return -1.0 if tiles["BLOCK_SIZE_N"] > 64 else 100.0

    assert Kernel(rule).search().run(1)[1].tiles == BASE


def test_between_searched_sizes_only_what_won_beside_them_is_tried_and_is_measured_there() -> None:
    def rule(tokens: int, tiles: Tiles) -> float:
        return 50.0 if tiles["BLOCK_SIZE_N"] == 128 and tokens != 24 else 100.0

    kernel = Kernel(rule)
    found = kernel.search().run(64)
    wide = {**BASE, "BLOCK_SIZE_N": 128}
    assert kernel.tried[48] == [wide]
    assert found[48].tiles == wide
    assert found[24].tiles == BASE, "it does not win there"


def test_every_size_has_a_share_of_the_time() -> None:
    kernel = Kernel(lambda n, tiles: 100.0 / tiles["BLOCK_SIZE_M"])
    found = kernel.search(len(BETWEEN) / KEPT).run(4096)
    times = [kernel.order.count(n) for n in SEARCHED]
    assert max(times) - min(times) <= 1 < min(times)
    assert {*kernel.order} == {*found} == {*SEARCHED, *BETWEEN}
    assert all(one.tiles["BLOCK_SIZE_M"] == 32 for one in found.values()), "no size had two steps"
    assert {n for n, one in found.items() if one.cut_short} == {*SEARCHED}


def test_nothing_is_measured_twice_at_a_size_but_the_best() -> None:
    kernel = Kernel(lambda n, tiles: 100.0 + abs(tiles["BLOCK_SIZE_N"] - 128) + tiles["num_stages"])
    found = kernel.search().run(4096)
    for tokens, tried in kernel.tried.items():
        labels = [label(tiles) for tiles in tried]
        best = {n for n in labels if labels.count(n) > 1}
        assert len({*labels} - {label(BASE)}) == found[tokens].tried
        assert label(BASE) not in labels
        assert all("x128x" in name for name in best), "narrower ones were never the best"


def test_without_time_vllms_own_stays_and_is_said_to_be_unmeasured() -> None:
    found = Kernel(lambda n, tiles: 100.0 / tiles["BLOCK_SIZE_N"]).search(seconds=0.0).run(64)
    assert {n: one.tiles for n, one in found.items()} == dict.fromkeys(sorted(found), BASE)
    searched = {n for n in SEARCHED if n <= 64}
    assert {n for n, one in found.items() if one.cut_short} == searched
    assert all((one.us, one.tried) == (None, 0) for one in found.values())


def test_the_last_measurement_decides() -> None:
    """What won once is measured beside each later step, and goes where it does not win again."""
    measured: list[str] = []

    def rule(tokens: int, tiles: Tiles) -> float:
        name = label(tiles)
        measured.append(name)
        return 50.0 if tiles["BLOCK_SIZE_N"] == 128 and measured.count(name) == 1 else 100.0

    assert Kernel(rule).search().run(1)[1].tiles == BASE
