"""Searches for the parts that make a whole fail, with as few trials as possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST = 4
"""Maximum number of parts of a culprit."""


@dataclass(frozen=True)
class Verdict:
    """The result of one trial.

    Args:
        how: `ended`, `hung` or `wrong`; empty if it is correct.
        why: the exception, or the measured error.
        likely: parts to suspect first.
        facts: further results, as JSON data.
    """

    how: str = ""
    why: str = ""
    likely: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


Trial = Callable[[tuple[str, ...]], Verdict]
"""Runs a trial with only these parts."""


@dataclass(frozen=True)
class Culprit:
    """Parts that fail without the others: one, or several that fail only together."""

    parts: tuple[str, ...]
    verdict: Verdict


def search(
    parts: Collection[str], trial: Trial, beneath: Mapping[str, Sequence[str]]
) -> tuple[str, list[Culprit]]:
    """Search for the smallest sets of parts that fail by themselves.

    Assumes that a failing set with more parts also fails, so two errors that cancel each other are
    not found. One culprit among n parts needs about log2(n) + 3 trials.

    Args:
        parts: all parts, without duplicates.
        trial: called once for each set. An exception ends the search.
        beneath: part -> its dependent parts.

    Returns:
        (status, culprits), which are disjoint, in the order of the search. The status is `right`,
        `found`, `elsewhere` (the whole also fails without any part) or `unsteady` (all parts
        together fail, but no set of at most `MOST` parts does). For the last two, the only culprit
        has no parts.
    """
    verdicts: dict[frozenset[str], Verdict] = {}
    likely: Sequence[str] = ()

    def verdict(some: Sequence[str]) -> Verdict:
        nonlocal likely
        key = frozenset(some)
        if key not in verdicts:
            verdicts[key] = trial(tuple(some))
        likely = verdicts[key].likely or likely
        return verdicts[key]

    def is_wrong(some: Sequence[str]) -> bool:
        return bool(verdict(some).how)

    rest, found = list(parts), []
    while is_wrong(rest):
        first = [part for part in likely if part in rest]
        ordered = [*first, *(part for part in rest if part not in first)]
        least = _least(ordered, is_wrong, len(first))
        if rest and not least:
            return "unsteady", [Culprit((), verdict([*parts]))]
        gone = {*least, *(below for part in least for below in beneath.get(part, ()))}
        rest = [part for part in rest if part not in gone]
        if is_wrong(rest) and is_wrong([]):
            return "elsewhere", [Culprit((), verdict([]))]  # the set is not the cause
        found.append(Culprit(least, verdict(least)))
    return ("found" if found else "right"), found


def _least(
    parts: Sequence[str], is_wrong: Callable[[Sequence[str]], bool], likely: int
) -> tuple[str, ...]:
    """Return a minimal failing subset of `parts`, which fail together; empty if trials contradict.

    The shortest failing prefix of the list ends with a needed part. If that part does not fail by
    itself, search the parts before it for the next needed part. The first trial has only the first
    `likely` parts.
    """
    needed: list[str] = []
    rest = list(parts)
    while not needed or not is_wrong(needed):
        if not rest or len(needed) == MOST:
            return ()
        right, wrong = 0, len(rest)  # lengths of prefixes of `rest`
        middle = likely
        while wrong - right > 1:
            if not right < middle < wrong:
                middle = (right + wrong) // 2
            if is_wrong([*needed, *rest[:middle]]):
                wrong = middle
            else:
                right = middle
        needed.append(rest[wrong - 1])
        rest = rest[: wrong - 1]
    return tuple(needed)
