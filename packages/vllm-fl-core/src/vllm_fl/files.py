"""The files that we write: whole or not at all, and never through a link that lies in their place.

A folder may be shared, as /tmp is. Whoever may write there may lay a link under a name that we are
going to use, so that what we write would land in a file of the user's.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


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


def open_to_append(path: Path) -> BinaryIO:
    """Open a file that grows, for reading as well; it is made where it is not there.

    Raises:
        OSError: it cannot be opened, is a link or no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, which is not followed", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(fd, "a+b")


def of_worker(named: str | Path, rank: int | str, replica: int) -> Path:
    """Return the path of a worker's file, made from the one that the user sets.

    Args:
        named: `vllm.prom` becomes `vllm.rank0.prom`, and `vllm.dp1.rank0.prom` for the second
            replica of data parallelism.
        rank: the worker's, within its replica.
        replica: which one, from 0.
    """
    path = Path(named)
    of_replica = f".dp{replica}" if replica else ""
    return path.parent / f"{path.stem}{of_replica}.rank{rank}{path.suffix}"
