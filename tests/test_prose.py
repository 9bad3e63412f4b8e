"""Comparison of engines on real models, with made-up answers."""

from __future__ import annotations

import math
from typing import Any

import prose
import pytest

TOKENS = 400


def said(off: float = 0.0, *, token: int = 7, lead: float = 2.0) -> dict[str, Any]:
    """Results of an engine that is `off` at each token of a text, and answers with one token."""
    return {
        "logprobs": [[-2.0 + off] * TOKENS],
        "leads": [[[token, lead]] * TOKENS],
        "tokens": [[token] * 4],
        "answer_leads": [[[token, lead]] * 4],
    }


def test_quantiles_see_what_a_mean_does_not() -> None:
    found = prose.distance([-2.0, -2.5] * 100, [-2.5, -2.0] * 100)
    assert found == prose.Distance(median=0.5, p99=0.5, largest=0.5, mean=0.0)
    assert prose.RIGHT.exceeded(found) == ["median 0.5 (at most 0.05)", "p99 0.5 (at most 0.4)"]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_infinitely_far(wrong: float) -> None:
    found = prose.distance([-2.0] * 99 + [wrong], [-2.0] * 100)
    assert len(prose.RIGHT.exceeded(found)) == 3


def test_a_right_engine_has_no_problem() -> None:
    assert prose.problems(said(), said(0.005), [-1.99] * TOKENS) == []


def test_an_engine_that_is_off_everywhere_is_far_from_stock_and_from_the_truth() -> None:
    found = prose.problems(said(), said(0.1), [-2.0] * TOKENS)
    assert [problem.split()[:3] for problem in found] == [
        ["to", "stock:", "median"],
        ["to", "stock:", "mean"],
        *(["to", "the", "truth:"] for _ in range(3)),
    ]


def test_where_stock_is_farther_from_the_truth_its_opinion_does_not_count() -> None:
    true, other = [-2.0] * TOKENS, {**said(), "leads": [[[8, 2.0]] * TOKENS]}
    assert prose.disagreements(said(0.4), other, true=true) == []
    assert len(prose.disagreements(said(0.4), other)) == TOKENS
    assert len(prose.disagreements(said(-0.4), {**other, **said(0.5, token=8)}, true=true)) > TOKENS


def test_two_right_engines_are_as_far_apart_as_a_model_makes_them() -> None:
    """One token in fifty differs, another in each engine: a model magnifies rounding."""
    stock, ours = said(), said()
    stock["logprobs"] = [[-2.35 if i % 50 == 1 else -2.0 for i in range(TOKENS)]]
    ours["logprobs"] = [[-1.55 if i % 50 == 2 else -2.0 for i in range(TOKENS)]]
    assert prose.problems(stock, ours, [-2.0] * TOKENS) == []
    true = [-2.35 if i % 50 == 1 else -2.0 for i in range(TOKENS)]
    assert any("to stock: p99" in problem for problem in prose.problems(stock, ours, true))


def test_another_opinion_counts_where_the_lead_is_clear() -> None:
    found = prose.disagreements(said(), said(token=8))
    assert len(found) == TOKENS + 1  # of an answer, only the first token
    assert found[0] == "0:0: 8 for 7, which leads by 2.00"
    with pytest.raises(ValueError, match="clear in only 0 positions"):
        prose.disagreements(said(lead=0.1), said(token=8, lead=0.1))
