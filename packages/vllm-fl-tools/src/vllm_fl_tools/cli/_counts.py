"""Numbers of things that an option takes, as `--batch 1,8`."""

from __future__ import annotations

from ._show import UsageError

__all__ = ["counts"]

MOST = 2**20


def counts(option: str, text: str, *, single: bool = False) -> tuple[int, ...]:
    """The numbers of an option, each once.

    Raises:
        UsageError: one is no number from 1 to 2**20, or there are several where one was asked for.
    """
    try:
        found = dict.fromkeys(int(part) for part in text.split(","))
    except ValueError:
        found = {}
    if not found or not 1 <= min(found) <= max(found) <= MOST or (single and len(found) > 1):
        wanted = "a number" if single else "numbers, as 1,8, each"
        raise UsageError(f"{option} {text}: expected {wanted} from 1 to {MOST}")
    return tuple(found)
