"""Options that several of these verbs have: names of what is installed, seconds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence

from vllm_fl.cli.common import UsageError
from vllm_fl.settings.policy import closest

__all__ = ["check_known", "positive_seconds"]


def check_known(what: str, asked: Sequence[str] | None, known: Collection[str]) -> None:
    """Raise UsageError where something that was asked for is not installed.

    Args:
        what: what it is, as its option has it: "op" of `--op`.
        asked: the names, or None.
        known: those that there are.
    """
    for name in asked or ():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"--{what} {name}: no such {what} is installed.{closest(name, known)} "
                f"Known: {listed}."
            )


def positive_seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds
