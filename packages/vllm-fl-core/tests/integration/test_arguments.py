"""A call's arguments as the seams see them, before and after they ask for its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the seams are vLLM's")

from vllm_fl.contracts.binding import OperatorPlace
from vllm_fl.integration.seams.arguments import leaving


def place(tokens: str) -> OperatorPlace:
    return OperatorPlace("acme::op", ("out", "x"), lambda op: op, lambda op: op, tokens=tokens)


def test_a_size_is_read_from_where_the_call_gives_it() -> None:
    leaves = leaving(place("x"), lambda tokens: tokens > 2)
    assert leaves is not None
    out, few, many = torch.empty(9), torch.empty(2, 8), torch.empty(3, 8)
    assert [leaves((out, x), {}) for x in (few, many)] == [False, True]
    assert [leaves((out,), {"x": x}) for x in (few, many)] == [False, True]
    assert [leaves((), {"x": x, "out": out}) for x in (few, many)] == [False, True]


@pytest.mark.parametrize("odd", [None, 3, "x", torch.tensor(3.0)])
def test_a_call_that_tells_no_size_is_not_left(odd: Any) -> None:
    leaves = leaving(place("x"), lambda tokens: True)
    assert leaves is not None
    assert not leaves((None, odd), {}) and not leaves((None,), {"x": odd})
    assert not leaves((), {})


def test_nothing_is_asked_where_no_size_is_left_or_the_place_tells_none() -> None:
    assert leaving(place("x"), None) is None
    assert leaving(place(""), lambda tokens: True) is None
