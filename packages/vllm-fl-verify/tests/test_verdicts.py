"""Kept verdicts: their files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_fl_verify import verdicts
from vllm_fl_verify.verdicts import (
    KeptVerdict,
    read_verdict,
    verdict_folder,
    verdict_summary,
    write_fault,
    write_verdict,
)

PARTS = {"device": "1", "tried": "2"}
KEPT = KeptVerdict(
    PARTS, frozenset({"silu_and_mul=vendor.acme"}), {"silu_and_mul=vendor.acme": [64]}
)
FAULT = "silu_and_mul", "vendor.acme"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of verdicts, in a home of its own; not created."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = verdict_folder()
    assert found is not None
    return found


def file_of(folder: Path) -> Path:
    return folder / f"{KEPT.key}.json"


def test_a_verdict_is_read_as_it_was_written(folder: Path) -> None:
    assert read_verdict(PARTS) is None
    write_verdict(KEPT)
    assert read_verdict(PARTS) == KEPT
    assert read_verdict({**PARTS, "device": "0"}) is None
    assert [file.name for file in folder.iterdir()] == [f"{KEPT.key}.json"]
    assert folder.stat().st_mode & 0o777 == 0o700 and file_of(folder).stat().st_mode & 0o077 == 0


def of_another_key(file: Path) -> None:
    other = KeptVerdict({"device": "2"}, KEPT.passed)
    write_verdict(other)
    os.rename(file.parent / f"{other.key}.json", file)


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def linked(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("other")))


ODD: dict[str, Callable[[Path], object]] = {
    "linked": linked,
    "with two names": lambda file: os.link(file, file.with_name("other")),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 9),
    "empty": lambda file: os.truncate(file, 0),
    "changed": lambda file: file.write_text(file.read_text().replace(".acme", ".emca")),
    "of another key": of_another_key,
    "not text": lambda file: file.write_bytes(b"\xff\xfe" * 99),
    "too large": lambda file: file.write_text(file.read_text() + " " * verdicts.LARGEST),
    "a pipe": a_pipe,
    "a folder": a_folder,
    "read by others": lambda file: file.chmod(0o644),
    "folder of others": lambda file: file.parent.chmod(0o770),
    "parent of others": lambda file: file.parent.parent.chmod(0o777),
    "folder linked": lambda file: linked(file.parent),
    "foreign": lambda file: os.chown(file, 65534, 65534),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_ignored_with_one_line(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can chown")
    write_verdict(KEPT)
    ODD[name](file_of(folder))
    with caplog.at_level(logging.INFO):
        assert read_verdict(PARTS) is None
    assert ["A kept verdict is ignored" in line for line in caplog.messages] == [True]


def test_nothing_is_written_through_a_link(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_verdict(KEPT)
    victim = folder / "victim"
    victim.write_text("own")
    file_of(folder).unlink()
    file_of(folder).symlink_to(victim)
    write_verdict(KEPT)
    assert victim.read_text() == "own" and read_verdict(PARTS) == KEPT
    linked(folder)
    with caplog.at_level(logging.INFO):
        write_verdict(KEPT)
    assert "The verdict of this startup is not kept" in caplog.text


def test_a_fault_outlasts_an_engine_that_writes_later(folder: Path) -> None:
    write_verdict(KEPT)
    write_fault(KEPT.key, FAULT, "it is incorrect")
    write_fault(KEPT.key, FAULT, "it is incorrect again")
    write_verdict(KEPT)  # a second engine, which started before
    assert read_verdict(PARTS) is None
    (fault,) = folder.glob("*.fault")
    assert "it is incorrect" in fault.read_text() and "again" not in fault.read_text()
    fault.write_text("")  # the disk was full
    assert read_verdict(PARTS) is None
    other = KeptVerdict({"device": "2"}, KEPT.passed)
    write_verdict(other)
    assert read_verdict(other.parts) == other


def test_a_summary_has_the_folder_and_the_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict_summary() == f"none in {folder}"
    write_verdict(KEPT)
    write_fault(KEPT.key, FAULT, "it is incorrect")
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert verdict_summary() == f"2 files, 1 of them faults, {size} bytes in {folder}"
    monkeypatch.setattr(verdicts, "verdict_folder", lambda: None)
    assert verdict_summary() == "none, because this user has no home directory"
    assert read_verdict(PARTS) is None
    write_verdict(KEPT)
