"""The list of verbs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commands import Command

from vllm_fl_tools.cli._verbs import VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(fl: Command, verb: str) -> None:
    done = fl(verb, "--help")
    assert done.status == 0, done.err
    assert "--json" in done.out
    assert done.out.splitlines()[-1].startswith(f"Example: vllm-fl {verb} ")
    (line,) = [line for line in fl("--help").out.splitlines() if line.split()[:1] == [verb]]
    assert len(line.split()) > 4


def test_help_of_all_verbs_needs_no_torch() -> None:
    code = (
        "import sys\nfrom vllm_fl_tools.cli import main\n"
        "try:\n main(['--help'])\nexcept SystemExit:\n pass\n"
        "slow = {'torch', 'vllm', 'triton', 'numpy', 'matplotlib', 'argcomplete'}\n"
        "assert not slow & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_verbs_run_without_their_docstrings() -> None:
    """`python -OO` removes docstrings."""
    for words in (["--help"], ["settings", "--help"]):
        command = [sys.executable, "-OO", "-m", "vllm_fl_tools.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout and "Traceback" not in done.stderr
