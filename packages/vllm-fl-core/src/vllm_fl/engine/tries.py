"""What a verification tries where time decides how much: noted as it goes, or as a lock has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

ENDED = "ended early"
"""The list of where time has run out."""

Lists = Mapping[str, Sequence[Any]]
"""Name -> what was tried, in its order: JSON."""


class Tries:
    """What one run of a verification tries.

    Args:
        told: the lists of an earlier run, which is repeated: time decides nothing then.

    Attributes:
        made: the lists of this run.
    """

    def __init__(self, told: Lists | None = None) -> None:
        self.told = told
        self.made: dict[str, list[Any]] = {}

    def takes(self, name: str, item: str | int, usual: bool = True) -> bool:
        """Whether this item of a list is tried; `usual` is whether it would be without a lock."""
        taken = usual if self.told is None else item in self.told.get(name, ())
        known = self.made.setdefault(name, [])
        if taken and item not in known:
            known.append(item)
        return taken

    def stops(self, where: str, is_late: bool) -> bool:
        """Whether this is left out, and what would follow it, since time has run out."""
        return self.takes(ENDED, where, is_late)

    def found(self, name: str, items: Iterable[int]) -> Iterator[int]:
        """The items of a list that takes time to find: a lock has it."""
        for item in items if self.told is None else self.told.get(name, ()):
            self.takes(name, item)
            yield item


class Tried:
    """All that the verification of a start tries, by who is tried.

    Args:
        told: the same of an earlier start, by a lock; of what is not in it, time decides.

    Attributes:
        made: that of this start: who -> the lists of each run.
    """

    def __init__(self, told: Mapping[str, Sequence[Lists]] | None = None) -> None:
        self.told = told or {}
        self._runs: dict[str, list[Tries]] = {}

    def of(self, who: str) -> Tries:
        """The next run of `who`: an op's implementation in a dtype, for example."""
        runs, told = self._runs.setdefault(who, []), self.told.get(who, ())
        runs.append(Tries(told[len(runs)] if len(runs) < len(told) else None))
        return runs[-1]

    @property
    def made(self) -> dict[str, list[dict[str, list[Any]]]]:
        """What was tried: who -> the lists of each run."""
        return {who: [run.made for run in runs] for who, runs in self._runs.items()}
