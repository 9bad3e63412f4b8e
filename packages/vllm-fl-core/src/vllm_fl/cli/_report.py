"""A report's file, which is known to be writable before the work starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ._show import UsageError

__all__ = ["ReportFile"]


class ReportFile:
    """A file that appears whole, or not at all.

    The room for it is made at once, beside the final place. Use as a context: leaving it without
    `write` leaves nothing behind.

    Args:
        path: where the report goes; an older one there is replaced.
        option: the option that names it, for errors.

    Raises:
        UsageError: it cannot be written there.
    """

    def __init__(self, path: str, option: str = "--report") -> None:
        self.path = Path(os.path.realpath(path))  # a link's target is replaced, not the link
        if self.path.exists():
            if not self.path.is_file():
                raise UsageError(f"{option} {path}: is not a regular file")
            if not os.access(self.path, os.W_OK):
                raise UsageError(f"{option} {path}: may not be written")
        try:
            handle, self._draft = tempfile.mkstemp(
                dir=self.path.parent, prefix=f".{self.path.name}.", suffix=".part"
            )
            os.close(handle)
        except OSError as error:
            raise UsageError(
                f"{option} {path}: cannot be written: {error.strerror}; nothing was run"
            ) from error

    def __enter__(self) -> ReportFile:
        return self

    def __exit__(self, *_: object) -> None:
        Path(self._draft).unlink(missing_ok=True)

    def write(self, text: str) -> None:
        """Put `text` there. Raises OSError, as for a disk that is full."""
        with open(self._draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(self._draft, 0o666 & ~mask)  # mkstemp's files are for their owner alone
        os.replace(self._draft, self.path)
