"""Error of an engine that differs from its lock file."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_fl.errors import StartError


class LockError(StartError):
    """The engine differs from its lock file.

    Attributes:
        file: path of the lock file.
        differences: one sentence each, without a full stop.
    """

    code = "FL505"

    def __init__(self, message: str, *, file: str = "", differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.file = file
        self.differences = tuple(differences)
