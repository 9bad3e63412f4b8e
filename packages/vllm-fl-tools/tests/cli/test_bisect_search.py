"""The search for culprits: its results, and its number of trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest

from vllm_fl_tools.cli._bisect_search import Verdict, search

Tried = list[tuple[str, ...]]
PARTS = [f"op{n}" for n in range(11)]


def wrong_with(
    *sets: str, likely: Sequence[str] = ()
) -> tuple[Callable[[tuple[str, ...]], Verdict], Tried]:
    """A trial that fails with any of these sets, such as `op1 op2`; and the list of trials."""
    tried: Tried = []

    def trial(parts: tuple[str, ...]) -> Verdict:
        assert frozenset(parts) not in map(frozenset, tried), "it was tried before"
        tried.append(parts)
        is_wrong = any({*names.split()} <= {*parts} for names in sets)
        return Verdict("wrong" if is_wrong else "", likely=likely)

    return trial, tried


def found(parts: Sequence[str], *sets: str, likely: Sequence[str] = ()) -> tuple[set[str], Tried]:
    """The culprits, each as `op1 op2`, and the trials."""
    trial, tried = wrong_with(*sets, likely=likely)
    return {" ".join(sorted(each.parts)) for each in search(parts, trial, {})[1]}, tried


@pytest.mark.parametrize("count", range(1, 12))
def test_one_culprit_takes_few_trials(count: int) -> None:
    for part in PARTS[:count]:
        named, tried = found(PARTS[:count], part)
        assert named == {part} and len(tried) <= math.ceil(math.log2(count)) + 3


def test_a_right_whole_takes_one_trial() -> None:
    named, tried = found(PARTS, "none")
    assert not named and tried == [tuple(PARTS)]
    assert search([], lambda _: Verdict(), {}) == ("right", [])


def test_several_culprits() -> None:
    for one, other in itertools.combinations(PARTS, 2):
        named, tried = found(PARTS, one, other)
        assert named == {one, other} and len(tried) <= 2 * math.ceil(math.log2(len(PARTS))) + 6
    assert found(PARTS, "op3", "op1 op7")[0] == {"op3", "op1 op7"}


def test_parts_that_are_wrong_only_together() -> None:
    for names in itertools.combinations(PARTS, 3):
        assert found(PARTS, " ".join(names))[0] == {" ".join(sorted(names))}


def test_a_whole_that_is_wrong_without_any_part() -> None:
    for parts in (PARTS, ["a"], []):
        status, (culprit,) = search(parts, lambda _: Verdict("wrong"), {})
        assert status == "elsewhere" and culprit.parts == ()


def test_an_exception_ends_the_search() -> None:
    def trial(parts: tuple[str, ...]) -> Verdict:
        if len(parts) == 1:
            raise RuntimeError(f"the engine with {parts} does not start")
        return Verdict("wrong")

    with pytest.raises(RuntimeError, match="op0"):
        search(PARTS, trial, {})


def test_likely_parts_are_tried_first() -> None:
    named, tried = found(PARTS, "op7", likely=["op7"])
    assert named == {"op7"}
    assert tried[1:] == [("op7",), tuple(part for part in PARTS if part != "op7")]
    for part in PARTS[1:]:
        named, tried = found(PARTS, part, likely=["op0"])
        assert named == {part} and len(tried) <= math.ceil(math.log2(len(PARTS))) + 4
    assert found(PARTS, "op2 op9", likely=["op9"])[0] == {"op2 op9"}


def test_parts_beneath_a_culprit_go_with_it() -> None:
    """The plugin's fault occurs while any part of the plugin is enabled."""
    of_plugin = {"plugin", "op3", "op4"}
    parts = ["op0", "plugin", "op3", "op4", "op5"]

    def trial(some: tuple[str, ...]) -> Verdict:
        return Verdict("wrong" if of_plugin & {*some} else "")

    status, (culprit,) = search(parts, trial, {"plugin": ["op3", "op4"]})
    assert status == "found" and culprit.parts == ("plugin",)


def test_trials_that_contradict_each_other_have_no_culprit() -> None:
    number = itertools.count()

    def trial(_: tuple[str, ...]) -> Verdict:
        return Verdict("wrong" if next(number) in (0, 9) else "")

    status, (culprit,) = search(PARTS, trial, {})
    assert status == "unsteady" and culprit.parts == ()
