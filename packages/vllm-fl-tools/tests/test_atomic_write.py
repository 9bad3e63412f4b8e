"""Files that we write: whole, and never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_fl_tools.atomic_write import Draft


def test_a_draft_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("older")
    with Draft(path) as draft:
        assert path.read_text() == "older"
        draft.put(b"newer", lasting=True)
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["out.txt"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_one_that_is_left_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Draft(tmp_path / "out.txt"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_a_link_in_its_place_is_replaced(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "out.txt"
    victim.write_text("mine")
    path.symlink_to(victim)
    with Draft(path) as draft:
        draft.put(b"ours")
    assert victim.read_text() == "mine" and not path.is_symlink()


def test_a_name_as_long_as_may_be(tmp_path: Path) -> None:
    with Draft(tmp_path / ("x" * 255)) as draft:
        draft.put(b"")
    with pytest.raises(OSError, match="too long"), Draft(tmp_path / ("x" * 256)) as draft:
        draft.put(b"")
