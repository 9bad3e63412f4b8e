"""What a table is said to be worth in a whole model."""

from __future__ import annotations

from vllm_fl_tools.cli._estimate import HOW, estimates
from vllm_fl_tools.engine.tuned import Figure, Row, TunedOp


def tuned(us: dict[int, tuple[float, float]], *rows: Row) -> TunedOp:
    """An op of which stock and another one take so many µs, by the number of tokens."""
    names = "stock", "vendor.fast"
    figures = [
        Figure(n, name, us=took)
        for n, both in us.items()
        for name, took in zip(names, both, strict=True)
    ]
    return TunedOp("stock", rows, tuple(figures))


def test_what_rows_save_of_a_step() -> None:
    # Ten layers of 100 µs, and a vocabulary's product as two of them: 1200 µs, of which 10 * 12.
    products = tuned({1: (100, 88), 64: (200, 190)}, Row(1, "vendor.fast"), Row(64, "default"))
    first, last, how = estimates([products], 10, 2.0)
    assert "10.0 % of a decoding step at batch 1" in first
    assert "0.0 % of 64 tokens" in last
    assert how == HOW


def test_every_op_counts_where_it_was_measured() -> None:
    products = tuned({1: (100, 90)}, Row(1, "default"))
    caches = tuned({1: (20, 10)}, Row(1, "vendor.fast"))
    told = [*estimates([products, caches], 10, 0.0)]
    assert "8.3 % of" in told[0]


def test_nothing_is_said_where_nothing_was_measured() -> None:
    assert [*estimates([tuned({})], 10, 2.0)] == []
