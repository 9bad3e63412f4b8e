"""The error of an engine that differs from its lock."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_fl.errors import StartError

__all__ = ["LockError"]


class LockError(StartError):
    """An engine differs from what its lock has.

    Attributes:
        file: the lock.
        differences: what differs, one sentence without a full stop each.
    """

    code = "FL505"

    def __init__(self, message: str, *, file: str = "", differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.file = file
        self.differences = tuple(differences)
