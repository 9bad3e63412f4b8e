"""The command under `python -OO`, which removes docstrings."""

from __future__ import annotations

import subprocess
import sys


def test_verbs_run_without_their_docstrings() -> None:
    for words in (["--help"], ["settings", "--help"]):
        command = [sys.executable, "-OO", "-m", "vllm_fl_tools.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout and "Traceback" not in done.stderr
