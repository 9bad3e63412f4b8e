"""Programs that a verb runs for their answer, and ends when none comes."""

from __future__ import annotations

import pytest

from vllm_fl.plugins import breadcrumb
from vllm_fl_tools.cli import _environment
from vllm_fl_tools.cli._environment import ProbeFailed, ask

NOTED = (
    "import os, time\nfrom vllm_fl.plugins.breadcrumb import running\n"
    "with running('the import of acme'):\n    {}"
)


def test_the_last_line_is_the_answer_and_an_error_is_told() -> None:
    assert ask("import sys; print(1); print(sys.argv[1])", "[2]", what="it") == [2]
    with pytest.raises(ProbeFailed, match="ValueError: no"):
        ask("raise ValueError('no')", what="it")
    with pytest.raises(ProbeFailed, match="ended with status 3"):
        ask("import os; os._exit(3)", what="it")


def test_one_that_is_given_up_leaves_no_note_and_one_that_dies_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ProbeFailed, match="ended with signal 6"):
        ask(NOTED.format("os.abort()"), what="it")
    (crumb,) = breadcrumb.lost()
    monkeypatch.setattr(_environment, "PATIENCE", 1.0)
    with pytest.raises(ProbeFailed, match=r"it took more than 1\.0 s"):
        ask(NOTED.format("time.sleep(60)"), what="it")
    assert breadcrumb.lost() == (crumb,)
