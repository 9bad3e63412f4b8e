"""Conclusions from interleaved measurements."""

from __future__ import annotations

import pytest

from vllm_fl_tools.engine.timing import ROOM, Measured, best_edges, in_turn, quartiles, table_rows
from vllm_fl_tools.engine.tuning_table import Row


def measured(tokens: int = 1, **times: list[float]) -> Measured:
    return Measured(tokens, "stock", times={n.replace("_", "."): of for n, of in times.items()})


def won(tokens: int, name: str) -> Measured:
    if name == "default":
        return measured(tokens, stock=[1.0] * 4)
    return measured(tokens, stock=[2.0] * 4, **{name: [1.0] * 4})


class TestInTurn:
    def test_everybody_is_called_once_a_round_and_nobody_is_always_first(self) -> None:
        called: list[str] = []

        def timer(name: str) -> float:
            called.append(name)
            return float(len(called))

        names = "abc"
        timers = {name: (lambda name=name: timer(name)) for name in names}
        times, dropped = in_turn(timers, 12)
        assert not dropped
        rounds = ["".join(called[n : n + 3]) for n in range(0, len(called), 3)]
        assert all(sorted(order) == list(names) for order in rounds)
        assert all(len(times[name]) == 12 for name in names)
        # Each is first, last and in between equally often, and each pair occurs in both orders.
        for place in range(3):
            assert {name: [r[place] for r in rounds].count(name) for name in names} == {
                name: 4 for name in names
            }
        assert sum(r.index("a") < r.index("b") for r in rounds) == 6

    def test_who_raises_is_dropped_and_the_others_go_on(self) -> None:
        calls = {"bad": 0}

        def bad() -> float:
            calls["bad"] += 1
            if calls["bad"] == 2:
                raise RuntimeError("lost the card")
            return 0.1

        times, dropped = in_turn({"good": lambda: 1.0, "bad": bad}, 5)
        assert times == {"good": [1.0] * 5}
        assert calls["bad"] == 2
        assert "lost the card" in dropped["bad"]

    def test_ctrl_c_is_no_failure_of_a_kernel(self) -> None:
        def interrupted() -> float:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            in_turn({"a": interrupted}, 1)


class TestPromotion:
    def test_the_fastest_of_those_that_beat_the_default(self) -> None:
        found = measured(stock=[4.0] * 4, vendor_a=[3.0] * 4, vendor_b=[2.0] * 4)
        assert found.winner == "vendor.b"

    @pytest.mark.parametrize(
        ("times", "wins"),
        [
            pytest.param([1.0] * 4, False, id="as fast"),
            pytest.param([1.0 / (ROOM - 0.001)] * 4, False, id="hardly faster"),
            pytest.param([1.0 / (ROOM + 0.001)] * 4, True, id="faster"),
            pytest.param([0.5, 0.5, 0.5, 1.2, 1.2], False, id="slower in too many rounds"),
            pytest.param([0.5, 0.5, 0.5, 0.5, 9.0], True, id="slower once"),
        ],
    )
    def test_by_the_rounds_pairs(self, times: list[float], wins: bool) -> None:
        found = measured(stock=[1.0] * len(times), vendor_a=times)
        assert found.winner == ("vendor.a" if wins else "default")

    def test_rounds_are_compared_within_themselves(self) -> None:
        # The machine became ten times slower in the middle, so medians are misleading.
        found = measured(stock=[1.0, 1.0, 10.0, 10.0, 10.0], vendor_a=[0.9, 0.9, 9.0, 9.0, 9.0])
        assert found.winner == "vendor.a"

    def test_who_was_rejected_never_wins(self) -> None:
        found = measured(stock=[2.0] * 4, vendor_a=[1.0] * 4)
        found.rejected["vendor.a"] = "wrong: …"
        assert found.winner == "default"


def sizes(*counts: int, **us: tuple[float, ...]) -> list[Measured]:
    """vLLM's code takes 10 µs at each size, the others what is given."""
    return [
        measured(tokens, stock=[10.0] * 4, **{name: [of[n]] * 4 for name, of in us.items()})
        for n, tokens in enumerate(counts)
    ]


class TestRowsOfWhatIsCompiledIn:
    """A graph is compiled once for every size, so its contents cannot differ by size."""

    def test_a_winner_that_loses_nowhere_serves_every_size(self) -> None:
        found = sizes(1, 16, 256, vendor_fast=(10.1, 8.0, 5.0))
        assert [row.impl for row in table_rows(found)] == ["default", "vendor.fast"]
        assert table_rows(found, {"stock"}) == (Row(256, "vendor.fast"),)

    def test_one_that_loses_somewhere_serves_none(self) -> None:
        found = sizes(1, 16, 256, vendor_fast=(10.5, 8.0, 5.0))
        assert table_rows(found, {"stock"}) == (Row(256, "default"),)

    def test_one_that_is_wrong_somewhere_serves_none(self) -> None:
        found = sizes(1, 16, 256, vendor_fast=(8.0, 8.0, 5.0))
        found[1].rejected["vendor.fast"] = "wrong: …"
        assert [row.impl for row in table_rows(found)] == ["vendor.fast", "default", "vendor.fast"]
        assert table_rows(found, {"stock"}) == (Row(256, "default"),)

    def test_operators_may_differ_by_size(self) -> None:
        found = sizes(1, 16, 256, vendor_fast=(10.5, 8.0, 5.0))
        assert table_rows(found, {"vendor.traced"}) == table_rows(found)


class TestRowsByRange:
    """Graphs compiled by range may differ between ranges, but not within one."""

    def test_each_range_has_one_row_of_who_loses_nowhere_in_it(self) -> None:
        found = sizes(1, 8, 64, 512, vendor_fast=(8.0, 10.1, 20.0, 5.0))
        assert table_rows(found, {"stock"}) == (Row(512, "default"),)
        rows = table_rows(found, {"stock"}, (8, 64))
        assert rows == (Row(8, "vendor.fast"), Row(64, "default"), Row(512, "vendor.fast"))
        rows = table_rows(found, {"stock"}, (1, 512))
        assert rows == (Row(1, "vendor.fast"), Row(512, "default"))

    def test_operators_differ_by_size_inside_a_range_where_nothing_is_inlined(self) -> None:
        found = sizes(
            1, 8, 64, 512, vendor_a=(8.0, 12.0, 12.0, 8.0), vendor_b=(12.0, 8.0, 12.0, 12.0)
        )
        rows = table_rows(found, {"stock"}, (8,))
        assert rows == (Row(1, "vendor.a"), Row(8, "vendor.b"), Row(512, "default"))

    def test_the_edges_are_those_that_gain_the_most_over_all_ops(self) -> None:
        little = sizes(1, 8, 64, 512, vendor_a=(9.0, 11.0, 11.0, 11.0))
        much = sizes(1, 8, 64, 512, vendor_b=(11.0, 11.0, 5.0, 11.0))
        ops = [(little, {"stock"}), (much, {"stock"})]
        assert best_edges(ops, 3) == (8, 64)
        assert best_edges(ops[:1], 3) == (1,)
        assert best_edges(ops, 2) == (1,), "one edge opens no range of 64 alone"
        assert best_edges(ops, 1) == ()

    def test_no_edge_is_taken_that_gains_nothing(self) -> None:
        everywhere = sizes(1, 8, 64, 512, vendor_a=(5.0, 5.0, 5.0, 5.0))
        opaque = sizes(1, 8, 64, 512, vendor_a=(5.0, 11.0, 11.0, 11.0))
        assert best_edges([(everywhere, {"stock"}), (opaque, {"other"})], 3) == ()
        assert best_edges([], 3) == ()


def test_a_rejected_one_has_its_reason_and_no_time() -> None:
    found = measured(stock=[4.0] * 11, vendor_a=[1.0] * 11)
    found.rejected["vendor.a"] = "wrong: the first row"
    figure = next(figure for figure in found.figures() if figure.impl == "vendor.a")
    assert (figure.us, figure.n, figure.rejected) == (None, 0, "wrong: the first row")


def test_neighbours_with_one_winner_are_one_row() -> None:
    winners = {1: "a", 2: "a", 4: "default", 8: "default", 16: "b", 32: "a"}
    found = table_rows([won(tokens, name) for tokens, name in reversed(winners.items())])
    assert found == (Row(2, "a"), Row(8, "default"), Row(16, "b"), Row(32, "a"))


def test_quartiles_of_one_value() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
