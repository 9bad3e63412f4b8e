"""Programs that a verb runs for their answer, and ends when none comes."""

from __future__ import annotations

import pytest

from vllm_fl_tools.cli import _environment
from vllm_fl_tools.cli._environment import ProbeFailed, ask


def test_the_last_line_is_the_answer_and_an_error_is_told() -> None:
    assert ask("import sys; print(1); print(sys.argv[1])", "[2]", what="it") == [2]
    with pytest.raises(ProbeFailed, match="ValueError: no"):
        ask("raise ValueError('no')", what="it")
    with pytest.raises(ProbeFailed, match="ended with status 3"):
        ask("import os; os._exit(3)", what="it")


def test_one_that_gives_no_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_environment, "PATIENCE", 0.5)
    with pytest.raises(ProbeFailed, match=r"it took more than 0\.5 s"):
        ask("import time; time.sleep(60)", what="it")
