"""Counting lines of code: what is a line of it, and of what files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from lines import code_lines, counted, sources

import envs

SOURCE = '''
"""A module,
of two lines."""

import os  # a line, with a comment

# A comment.
LIMIT = (
    3
)
"""What it limits."""

def outer(x): """Its docstring, on a line of code."""

class Layer:
    """A docstring."""

    def call(self):
        """Another."""
        text = """two

        of three"""
        return """told"""
'''


def test_comments_docstrings_and_blank_lines_are_left_out() -> None:
    assert code_lines(SOURCE) == 10
    assert code_lines("") == code_lines('"""Nothing."""\n') == 0


def test_distributions_and_rooms_of_core_are_counted_apart() -> None:
    modules = {
        "vllm-fl-core/src/vllm_fl/text.py": "A = 1\n",
        "vllm-fl-core/src/vllm_fl/cli/new.py": "A = 1\nB = 2\n",
        "vllm-fl-core/src/vllm_fl/cli/parts/one.py": "A = 1\n",
        "vllm-fl-cuda/src/vllm_fl_cuda/impl/norm.py": "# none\n",
    }
    assert counted(iter(modules.items())) == {
        "vllm-fl-core": 4,
        "vllm-fl-core: (beside the rooms)": 1,
        "vllm-fl-core: cli": 3,
        "vllm-fl-cuda": 0,
    }


def test_a_commit_is_counted_as_its_working_tree_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("src/vllm_fl_a/a.py", "A = 1\n"), ("tests/test_a.py", "B = 1\n")):
        path = tmp_path / "packages" / "vllm-fl-a" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setattr(envs, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    assert [*sources()] == [*sources("HEAD")] == [("vllm-fl-a/src/vllm_fl_a/a.py", "A = 1\n")]
    with pytest.raises(SystemExit, match="name a commit"):
        [*sources("nosuch")]
