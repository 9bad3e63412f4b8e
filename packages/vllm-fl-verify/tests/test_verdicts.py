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


def linked(folder: Path) -> None:
    os.rename(file_of(folder), folder / "other")
    file_of(folder).symlink_to("other")


def with_two_names(folder: Path) -> None:
    os.link(file_of(folder), folder / "other")


def truncated(folder: Path) -> None:
    os.truncate(file_of(folder), file_of(folder).stat().st_size - 9)


def empty(folder: Path) -> None:
    os.truncate(file_of(folder), 0)


def changed(folder: Path) -> None:
    text = file_of(folder).read_text()
    file_of(folder).write_text(text.replace("vendor.acme", "vendor.emca"))


def of_another_key(folder: Path) -> None:
    other = KeptVerdict({"device": "2"}, KEPT.passed)
    write_verdict(other)
    os.rename(folder / f"{other.key}.json", file_of(folder))


def not_text(folder: Path) -> None:
    file_of(folder).write_bytes(b"\xff\xfe" * 99)


def too_large(folder: Path) -> None:
    with file_of(folder).open("a") as file:
        file.write(" " * verdicts.LARGEST)


def a_pipe(folder: Path) -> None:
    file_of(folder).unlink()
    os.mkfifo(file_of(folder))


def a_folder(folder: Path) -> None:
    file_of(folder).unlink()
    file_of(folder).mkdir()


def read_by_others(folder: Path) -> None:
    file_of(folder).chmod(0o644)


def folder_of_others(folder: Path) -> None:
    folder.chmod(0o770)


def parent_of_others(folder: Path) -> None:
    folder.parent.chmod(0o777)


def folder_linked(folder: Path) -> None:
    os.rename(folder, folder.with_name("other"))
    folder.symlink_to("other")


def foreign(folder: Path) -> None:
    os.chown(file_of(folder), 65534, 65534)


@pytest.mark.parametrize(
    "spoil",
    [
        linked,
        with_two_names,
        truncated,
        empty,
        changed,
        of_another_key,
        not_text,
        too_large,
        a_pipe,
        a_folder,
        read_by_others,
        folder_of_others,
        parent_of_others,
        folder_linked,
        pytest.param(
            foreign, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can chown")
        ),
    ],
    ids=lambda value: value.__name__,
)
def test_an_odd_file_is_ignored_with_one_line(
    spoil: Callable[[Path], None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_verdict(KEPT)
    spoil(folder)
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
    folder_linked(folder)
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
