"""The search for the parts of a whole that make it wrong, with as few trials as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Culprit", "Trial", "UnsettledError", "Verdict", "culprits", "search"]

MOST = 4
"""The most parts that can be found to be wrong only together."""

NOTHING: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True)
class Verdict:
    """The result of one trial.

    Args:
        how: `ended`, `hung` or `wrong`; empty if it is right.
        why: the exception, or the error that was measured.
        likely: parts to suspect first.
        facts: further results, as JSON data.
    """

    how: str = ""
    why: str = ""
    likely: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


Trial = Callable[[tuple[str, ...]], Verdict]
"""Try some parts, without all others."""


@dataclass(frozen=True)
class Culprit:
    """Parts that are wrong without the others: one, or several that are wrong only together."""

    parts: tuple[str, ...]
    verdict: Verdict


class UnsettledError(Exception):
    """Two trials contradict each other."""


def search(
    parts: Iterable[str], trial: Trial, *, beneath: Mapping[str, Sequence[str]] = NOTHING
) -> tuple[str, list[Culprit]]:
    """Search for culprits.

    Args:
        parts, trial, beneath: as for `culprits`.

    Returns:
        `right`, `found`, `elsewhere`: the whole is wrong without any part, or `unsteady`: trials
        contradict each other. And the culprits; of the last two statuses one without parts.
    """
    parts = tuple(parts)
    try:
        found = culprits(parts, trial, beneath=beneath)
    except UnsettledError:
        return "unsteady", [Culprit((), trial(parts))]
    if not found:
        return "right", []
    return "found" if found[0].parts else "elsewhere", found


def culprits(
    parts: Iterable[str], trial: Trial, *, beneath: Mapping[str, Sequence[str]] = NOTHING
) -> list[Culprit]:
    """The smallest sets of parts that are wrong by themselves.

    Adding parts to a wrong set is taken to keep it wrong: two errors that cancel each other are not
    found. One culprit among n parts takes about log2(n) + 3 trials.

    Args:
        parts: all of them, each once.
        trial: called once for each set. An exception ends the search.
        beneath: part -> the parts that exist only with it.

    Returns:
        Sets without a common part, in the order in which they were found. No set if the whole is
        right, and one empty set if the whole is wrong without any part.

    Raises:
        UnsettledError: the whole is wrong, and no few parts of it are.
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
        least = _least(ordered, is_wrong, len(first)) if rest else ()
        gone = {*least, *(below for part in least for below in beneath.get(part, ()))}
        rest = [part for part in rest if part not in gone]
        if is_wrong(rest) and is_wrong([]):
            return [Culprit((), verdict([]))]  # the set that was found is not the cause
        found.append(Culprit(least, verdict(least)))
    return found


def _least(
    parts: Sequence[str], is_wrong: Callable[[Sequence[str]], bool], likely: int
) -> tuple[str, ...]:
    """The parts without which `parts`, which are wrong together, are right.

    The shortest wrong beginning of the list ends with a part that is needed. If that part is right
    by itself, the next one is found in the same way among those before it. The first trial is of
    the first `likely` parts.
    """
    needed: list[str] = []
    rest = list(parts)
    while not needed or not is_wrong(needed):
        if not rest or len(needed) == MOST:
            raise UnsettledError
        right, wrong = 0, len(rest)  # lengths of beginnings of `rest`
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
