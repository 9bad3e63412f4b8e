"""The files that we write: whole or not at all, and never through a link that lies in their place.

A folder may be shared, as /tmp is. Whoever may write there may lay a link under a name that we are
going to use, so that what we write would land in a file of the user's.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


class Draft:
    """A new file beside its final place, where it is put when it is whole.

    Use as a context: leaving it without `put` leaves nothing behind.

    Args:
        path: the final place. What is there, a link too, is replaced.

    Raises:
        OSError: no file can be made there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._beside = path.with_name(f".vllm-fl-{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = open(os.open(self._beside, flags, 0o666), "wb")  # noqa: SIM115

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk, which `put` has told
            self._file.close()
        with suppress(OSError):
            self._beside.unlink(missing_ok=True)

    def put(self, data: bytes, *, lasting: bool = False) -> None:
        """The file is this, and lies in its place.

        Args:
            data: all of it.
            lasting: whether it is to outlive a failure of the power.

        Raises:
            OSError: as for a disk that is full.
        """
        self._file.write(data)
        self._file.flush()
        if lasting:
            os.fsync(self._file.fileno())
        os.replace(self._beside, self.path)
