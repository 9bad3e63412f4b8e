"""Merging the orders that several distributions list for one op: one pure function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .policy import Token

__all__ = ["Listed", "Merged", "Pair", "merge"]

OWN, OTHER = 2, 1
"""What a list's word counts about a pair: who wrote one of the two knows it best."""


@dataclass(frozen=True)
class Listed:
    """What one distribution lists, best first.

    Args:
        source: who lists it, as a report names it.
        tokens: the list.
        owns: the tokens that stand for implementations of this distribution alone.
    """

    source: str
    tokens: tuple[Token, ...]
    owns: frozenset[Token] = frozenset()


@dataclass(frozen=True)
class Pair:
    """`before` stands before `after`, with this weight, in the lists of these sources."""

    before: Token
    after: Token
    weight: int
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.before} before {self.after} (weight {self.weight}: {', '.join(self.sources)})"
        )


@dataclass(frozen=True)
class Merged:
    """One order made of several lists.

    Args:
        tokens: the tokens of all lists, in the merged order.
        dropped: what some list says and the merged order contradicts, heaviest first.
    """

    tokens: tuple[Token, ...]
    dropped: tuple[Pair, ...]


def merge(lists: Iterable[Listed], default: Sequence[str]) -> Merged:
    """Merge lists by ranked pairs. The order in which they are given does not matter.

    Each pair that a list orders weighs 2 where the list's distribution owns one of the two tokens,
    else 1; the weights of each direction are summed, and equal ones cancel. The heaviest first
    (ties by the tokens' names), a pair is kept unless it contradicts those kept before. The tokens
    are then sorted so that each kept pair holds; what that leaves open goes by the default order,
    then by name.

    Args:
        lists: what each distribution lists. Of a token that a list repeats the first place counts.
        default: the kinds of the default order, `stock` among them.
    """
    lists = tuple(lists)
    pairs = _weighed(lists)
    tokens = {token for listed in lists for token in listed.tokens}
    kept: dict[Token, set[Token]] = defaultdict(set)
    heaviest = sorted(pairs.values(), key=lambda p: (-p.weight, str(p.before), str(p.after)))
    for pair in heaviest:
        reverse = pairs.get((pair.after, pair.before))
        cancelled = reverse is not None and reverse.weight == pair.weight
        if not cancelled and not _leads(kept, pair.after, pair.before):
            kept[pair.before].add(pair.after)
    order = _sorted(tokens, kept, default)
    place = {token: n for n, token in enumerate(order)}
    dropped = [pair for pair in heaviest if place[pair.before] > place[pair.after]]
    return Merged(order, tuple(dropped))


def _weighed(lists: Iterable[Listed]) -> dict[tuple[Token, Token], Pair]:
    """(before, after) -> the pair with its summed weight."""
    weights: dict[tuple[Token, Token], int] = defaultdict(int)
    sources: dict[tuple[Token, Token], set[str]] = defaultdict(set)
    for listed in lists:
        tokens = tuple(dict.fromkeys(listed.tokens))
        for n, before in enumerate(tokens):
            for after in tokens[n + 1 :]:
                own = before in listed.owns or after in listed.owns
                weights[before, after] += OWN if own else OTHER
                sources[before, after].add(listed.source)
    return {
        (before, after): Pair(before, after, weight, tuple(sorted(sources[before, after])))
        for (before, after), weight in weights.items()
    }


def _leads(kept: dict[Token, set[Token]], start: Token, end: Token) -> bool:
    """Whether the pairs that are kept put `start` before `end`."""
    ahead, seen = [start], {start}
    while ahead:
        token = ahead.pop()
        if token == end:
            return True
        found = kept.get(token, set()) - seen
        seen |= found
        ahead += found
    return False


def _sorted(
    tokens: set[Token], kept: dict[Token, set[Token]], default: Sequence[str]
) -> tuple[Token, ...]:
    """Each kept pair holds; of the tokens that may come next, the default order's first does."""

    def rank(token: Token) -> tuple[int, str]:
        kind = token.preference
        return (default.index(kind) if kind in default else len(default), str(token))

    order: list[Token] = []
    left = sorted(tokens, key=rank)
    while left:
        behind = {after for token in left for after in kept.get(token, ())}
        order.append(next(token for token in left if token not in behind))
        left.remove(order[-1])
    return tuple(order)
