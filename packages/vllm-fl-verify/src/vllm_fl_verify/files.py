"""The files of a worker: their names, and files that grow."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


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
