"""Writes files atomically, and never through a symbolic link at their path.

In a shared directory such as /tmp, another user may create a link at a path that vllm-fl is about
to write; the link could point to one of the user's own files.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


class Draft:
    """A temporary file in the directory of `path`, which replaces `path` when it is complete.

    Use as a context manager: without `put`, leaving it deletes the temporary file.

    Args:
        path: final path. An existing file, or a link itself, is replaced.

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
        """Write the data and replace `path`.

        Args:
            data: the complete contents.
            lasting: whether the contents must survive a power failure (fsync).

        Raises:
            OSError: for example, the disk is full.
        """
        self._file.write(data)
        self._file.flush()
        if lasting:
            os.fsync(self._file.fileno())
        os.replace(self._beside, self.path)
