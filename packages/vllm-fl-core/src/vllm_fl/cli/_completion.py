"""What a shell offers for the rest of a command line, where argcomplete is installed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from ..plugins.loading import known_contracts

__all__ = ["complete", "is_asked_for"]


def is_asked_for() -> bool:
    """Whether it is the shell that asks."""
    return "_ARGCOMPLETE" in os.environ


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end the process, if it was the shell that asked."""
    if not is_asked_for():  # spares every other run the import
        return
    import argcomplete

    for action in _actions(parser):
        if action.metavar == "OP":
            action.completer = _ops  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)


def _ops(**_: object) -> list[str]:
    """The ops of distributions that bring contracts alone; no other plugin is loaded while somebody
    types."""
    return [*known_contracts().contracts]
