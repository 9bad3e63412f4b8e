"""Which parts of a whole make it wrong: a search that asks as seldom as it can."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["UnsettledError", "culprits"]

MOST = 4
"""The most parts that are taken to be wrong only together."""

NOTHING: Mapping[str, Sequence[str]] = {}


class UnsettledError(Exception):
    """The answers contradict each other: what was wrong once is right now, or the other way."""


def culprits(
    parts: Iterable[str],
    is_wrong: Callable[[tuple[str, ...]], bool],
    *,
    likely: Callable[[Sequence[str]], Sequence[str]] = lambda rest: (),
    beneath: Mapping[str, Sequence[str]] = NOTHING,
) -> list[tuple[str, ...]]:
    """The smallest sets of parts that are wrong with none of the others beside them.

    What is wrong is taken to stay wrong when parts are added: two errors that cancel each other are
    not looked for. One culprit among n parts is found with about log2(n) + 3 questions.

    Args:
        parts: the whole's, each once.
        is_wrong: whether these parts are wrong together, without the others. It is asked once for
            each set, and what it raises ends the search.
        likely: of the parts that are left, those to suspect first. The first question is then
            whether they alone are wrong: one question more where they are not.
        beneath: part -> those that are nothing without it, and go with it.

    Returns:
        One part each, or several that are wrong only together, in the order in which they were
        found; they have no part in common. Nothing where the whole is right. One empty set where
        the whole is wrong without any part.

    Raises:
        UnsettledError: no few parts are wrong together, though the whole is.
    """
    answers: dict[frozenset[str], bool] = {}

    def wrong(some: Sequence[str]) -> bool:
        key = frozenset(some)
        if key not in answers:
            answers[key] = is_wrong(tuple(some))
        return answers[key]

    rest, found = list(parts), []
    while wrong(rest):
        first = likely(rest) if rest else ()
        ordered = [*first, *(part for part in rest if part not in first)]
        least = _least(ordered, wrong, len(first)) if rest else ()
        gone = {*least, *(below for part in least for below in beneath.get(part, ()))}
        rest = [part for part in rest if part not in gone]
        if wrong(rest) and wrong([]):
            return [()]  # what was named only seemed to be needed
        found.append(least)
    return found


def _least(
    parts: Sequence[str], wrong: Callable[[Sequence[str]], bool], likely: int
) -> tuple[str, ...]:
    """The parts without which `parts`, which are wrong together, are not.

    The shortest beginning of the list that is wrong ends with a part that is needed. Where that is
    not enough by itself, the next needed one is found in the same way among those before it. Of the
    list the first `likely` parts are asked for first.
    """
    needed: list[str] = []
    rest = list(parts)
    while not needed or not wrong(needed):
        if not rest or len(needed) == MOST:
            raise UnsettledError
        right, is_known_wrong = 0, len(rest)  # lengths of beginnings of `rest`
        middle = likely
        while is_known_wrong - right > 1:
            if not right < middle < is_known_wrong:
                middle = (right + is_known_wrong) // 2
            if wrong([*needed, *rest[:middle]]):
                is_known_wrong = middle
            else:
                right = middle
        needed.append(rest[is_known_wrong - 1])
        rest = rest[: is_known_wrong - 1]
    return tuple(needed)
