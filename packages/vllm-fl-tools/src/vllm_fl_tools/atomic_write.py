"""Writes files atomically, and never through a symbolic link at their path.

In a shared directory such as /tmp, another user may have created a link to a file of this user.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


class Draft:
    """A temporary file that replaces `path`, in the same directory, when it is complete.

    Use as a context manager: without `put`, leaving it deletes the temporary file. If `path` is a
    link, the link itself is replaced.

    Raises:
        OSError: no file can be created in the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._beside = path.with_name(f".vllm-fl-{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = open(os.open(self._beside, flags, 0o666), "wb")  # noqa: SIM115

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the disk is full, which `put` has already raised
            self._file.close()
        with suppress(OSError):
            self._beside.unlink(missing_ok=True)

    def put(self, data: bytes, *, lasting: bool = False) -> None:
        """Write the complete contents and replace `path`; with `lasting`, call fsync before.

        Raises:
            OSError: for example, the disk is full.
        """
        self._file.write(data)
        self._file.flush()
        if lasting:
            os.fsync(self._file.fileno())
        os.replace(self._beside, self.path)
