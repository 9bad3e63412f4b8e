"""Files with verdicts of earlier startups, in a folder that only this user can change.

A verdict lists the implementations that passed a full verification with one key. A later fault has
a separate file, so another engine that writes the verdict does not remove it. Links are not
followed, and files are replaced atomically. A changed file is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_fl.logs import get_logger
from vllm_fl.plugins.breadcrumb import cache_folder, make_private
from vllm_fl.plugins.inspection import Key
from vllm_fl.text import quote

log = get_logger("engine")

FILE_FORMAT = 1

LARGEST = 2**20
"""Maximum bytes of a verdict's file."""

FAULT = ".fault"

OPENED = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True)
class KeptVerdict:
    """The result of a full verification.

    Args:
        parts: name -> hash of a part of the key.
        passed: the roles that passed, by `Role.name`.
        choices: the choices that implementations made by timing, JSON-able.
    """

    parts: Mapping[str, str]
    passed: frozenset[str] = frozenset()
    choices: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return hashed(self.parts)


def hashed(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32]


def verdict_folder() -> Path | None:
    return cache_folder("verdicts")


def read_verdict(parts: Mapping[str, str]) -> KeptVerdict | None:
    """Return the verdict with these parts of a key. None, with a line in the log, if a later check
    has found a fault, or if the file or its folder cannot be trusted."""
    key = hashed(parts)
    try:
        with _opened() as folder:
            if any(f.startswith(f"{key}.") and f.endswith(FAULT) for f in os.listdir(folder)):
                log.info("Everything is verified again: a check after an earlier startup failed")
                return None
            return _parsed(_content(folder, f"{key}.json"), parts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        log.warning("A kept verdict is ignored, and everything is verified: %s", quote(error))
        return None


def write_verdict(verdict: KeptVerdict) -> None:
    text = json.dumps({"version": FILE_FORMAT, **vars(verdict), "passed": sorted(verdict.passed)})
    part = f".{secrets.token_hex(8)}.part"
    try:
        with _opened(creates=True) as folder:
            try:
                _write(folder, part, f"{hashed(text)}\n{text}".encode())
                os.replace(part, f"{verdict.key}.json", src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):  # it has its name
                    os.unlink(part, dir_fd=folder)
    except OSError as error:
        log.info("The verdict of this startup is not kept: %s", quote(error))


def write_fault(key: str, fault: Key, why: str) -> None:
    """Record that a verdict of this key is void, because of an implementation's fault. An existing
    file is kept. Only its name has an effect, so it also counts if the disk is full."""
    text = json.dumps({"version": FILE_FORMAT, "fault": fault, "why": why})
    try:
        with _opened(creates=True) as folder, suppress(FileExistsError):
            _write(folder, f"{key}.{hashed(fault)}{FAULT}", text.encode(errors="replace"))
    except OSError as error:
        log.warning("Cannot record a fault for the next startup: %s", quote(error))


def verdict_summary() -> str:
    """Return where verdicts are, how many, and how large, for `vllm-fl doctor`."""
    folder = verdict_folder()
    if folder is None:
        return "none, because this user has no home directory"
    try:
        sizes = {each.name: each.stat(follow_symlinks=False).st_size for each in os.scandir(folder)}
    except OSError:
        return f"none in {folder}"
    faults = sum(name.endswith(FAULT) for name in sizes)
    return f"{len(sizes)} files, {faults} of them faults, {sum(sizes.values())} bytes in {folder}"


@contextmanager
def _opened(*, creates: bool = False) -> Iterator[int]:
    """Provide a descriptor of the folder. Raises OSError if it is missing, or if another user might
    have changed or replaced it."""
    where = verdict_folder()
    if where is None:
        raise FileNotFoundError("this user has no home directory")
    if creates:
        make_private(where)
    for path in (where, *where.parents):
        _expect_own(path, path.lstat())
    folder = os.open(where, os.O_RDONLY | os.O_DIRECTORY | OPENED)
    try:
        _expect_own(where, os.fstat(folder), private=True)
        yield folder
    finally:
        os.close(folder)


def _expect_own(path: Path, found: os.stat_result, *, private: bool = False) -> None:
    mode, others = found.st_mode, stat.S_IWGRP | stat.S_IWOTH
    is_sticky = found.st_uid == 0 and stat.S_ISDIR(mode) and mode & stat.S_ISVTX
    if stat.S_ISLNK(mode):
        raise PermissionError(f"{path} is a link")
    if found.st_uid not in ({os.geteuid()} if private else {0, os.geteuid()}):
        raise PermissionError(f"{path} belongs to another user")
    if mode & others and not is_sticky:
        raise PermissionError(f"other users can write to {path}: chmod go-w {path}")
    if private and mode & 0o077:
        raise PermissionError(f"other users can read {path}: chmod 700 {path}")


def _content(folder: int, name: str) -> bytes:
    with open(os.open(name, os.O_NONBLOCK | OPENED, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise PermissionError(f"{name} is not a regular file, or has several hard links")
        _expect_own(Path(name), found, private=True)
        return file.read(LARGEST + 1)


def _parsed(data: bytes, parts: Mapping[str, str]) -> KeptVerdict:
    checksum, _, text = data.decode().partition("\n")
    if len(data) > LARGEST or hashed(text) != checksum:
        raise ValueError("its checksum differs")
    body = json.loads(text)
    if body["version"] != FILE_FORMAT or body["parts"] != parts:
        raise ValueError("it has another key")
    return KeptVerdict(parts, frozenset(map(str, body["passed"])), dict(body["choices"]))


def _write(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPENED
    with open(os.open(name, flags, 0o600, dir_fd=folder), "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
