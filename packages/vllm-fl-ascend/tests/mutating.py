"""Modules of this package with one mistake edited into their source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Mutant", "made_anew"]


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in the module's source, is replaced by `new`."""

    family: str
    module: ModuleType
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.family}: {' '.join(self.new.split()) or 'no ' + self.old.strip()}"


def made_anew(module: ModuleType, mutant: Mutant | None, **names: Any) -> ModuleType:
    """The module executed again, with the mistake if it is in there, and then `names` set in it."""
    source = Path(str(module.__file__)).read_text()
    if mutant is not None and mutant.module is module:
        places = source.count(mutant.old)
        assert places == 1, f"{mutant}: {places} places to edit"
        source = source.replace(mutant.old, mutant.new)
    made = ModuleType(module.__name__)
    made.__package__ = module.__package__
    made.__file__ = module.__file__
    exec(compile(source, f"<{module.__name__}>", "exec"), made.__dict__)
    made.__dict__.update(names)
    return made
