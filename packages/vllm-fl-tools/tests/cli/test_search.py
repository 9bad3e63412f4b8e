"""The search for culprits: what it names, and how seldom it asks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from vllm_fl_tools.cli._search import UnsettledError, culprits

Asked = list[tuple[str, ...]]
PARTS = [f"op{n}" for n in range(11)]


def wrong_with(*sets: str) -> tuple[Callable[[tuple[str, ...]], bool], Asked]:
    """Parts are wrong where one of the sets, as `op1 op2`, is whole among them; what was asked."""
    asked: Asked = []

    def is_wrong(parts: tuple[str, ...]) -> bool:
        assert frozenset(parts) not in map(frozenset, asked), "it was asked before"
        asked.append(parts)
        return any({*names.split()} <= {*parts} for names in sets)

    return is_wrong, asked


@pytest.mark.parametrize("count", range(1, 12))
def test_a_single_culprit_is_named_wherever_it_stands(count: int) -> None:
    for part in PARTS[:count]:
        is_wrong, asked = wrong_with(part)
        assert culprits(PARTS[:count], is_wrong) == [(part,)]
        assert len(asked) <= math.ceil(math.log2(count)) + 3


def test_the_right_whole_takes_one_question() -> None:
    is_wrong, asked = wrong_with()
    assert culprits(PARTS, is_wrong) == [] and asked == [tuple(PARTS)]
    assert culprits([], lambda _: False) == []


def test_two_culprits_are_named_each_by_itself() -> None:
    for one, other in itertools.combinations(PARTS, 2):
        is_wrong, asked = wrong_with(one, other)
        assert sorted(culprits(PARTS, is_wrong)) == sorted([(one,), (other,)])
        assert len(asked) <= 2 * math.ceil(math.log2(len(PARTS))) + 6


def test_parts_that_are_wrong_only_together_are_named_together() -> None:
    for names in itertools.combinations(PARTS, 3):
        is_wrong, _ = wrong_with(" ".join(names))
        (found,) = culprits(PARTS, is_wrong)
        assert {*found} == {*names}


def test_one_by_itself_and_two_together() -> None:
    is_wrong, _ = wrong_with("op3", "op1 op7")
    assert {frozenset(found) for found in culprits(PARTS, is_wrong)} == {
        frozenset({"op3"}),
        frozenset({"op1", "op7"}),
    }


def test_what_is_wrong_without_any_part_is_none_of_them() -> None:
    is_wrong, asked = wrong_with("")
    assert culprits(PARTS, is_wrong) == [()]
    assert () in asked
    assert culprits([], lambda _: True) == [()]


def test_a_culprit_beside_something_that_is_no_part() -> None:
    """The one that is wrong by itself is not to hide that the rest is wrong, too."""
    found = culprits(["a"], lambda parts: True)
    assert found == [()]


def test_what_a_question_raises_ends_the_search() -> None:
    def is_wrong(parts: tuple[str, ...]) -> bool:
        if len(parts) == 1:
            raise RuntimeError(f"the engine with {parts} does not start")
        return True

    with pytest.raises(RuntimeError, match="op0"):
        culprits(PARTS, is_wrong)


def test_what_is_likely_is_asked_first() -> None:
    is_wrong, asked = wrong_with("op7")
    assert culprits(PARTS, is_wrong, likely=lambda rest: ["op7"]) == [("op7",)]
    assert asked[1:] == [("op7",), tuple(part for part in PARTS if part != "op7")]


def test_what_seemed_likely_and_is_not_costs_one_question() -> None:
    for part in PARTS[1:]:
        is_wrong, asked = wrong_with(part)
        assert culprits(PARTS, is_wrong, likely=lambda rest: ["op0"]) == [(part,)]
        assert len(asked) <= math.ceil(math.log2(len(PARTS))) + 4


def test_what_is_likely_may_be_half_of_what_is_wrong_together() -> None:
    is_wrong, _ = wrong_with("op2 op9")
    (found,) = culprits(PARTS, is_wrong, likely=lambda rest: [p for p in ["op9"] if p in rest])
    assert {*found} == {"op2", "op9"}


def test_parts_beneath_a_culprit_go_with_it() -> None:
    """Whatever of a plugin is on, it is loaded: with each of its parts its own fault is there."""
    of_plugin = {"plugin", "op3", "op4"}
    parts = ["op0", "plugin", "op3", "op4", "op5"]
    found = culprits(
        parts, lambda some: bool(of_plugin & {*some}), beneath={"plugin": ["op3", "op4"]}
    )
    assert found == [("plugin",)]


def test_answers_that_contradict_each_other_are_no_culprit() -> None:
    asked = itertools.count()
    with pytest.raises(UnsettledError):
        culprits(PARTS, lambda parts: next(asked) < 1)
