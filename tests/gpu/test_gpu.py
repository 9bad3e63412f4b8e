"""The GPU cases as one test; without a GPU it is skipped with the reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_every_case_is_as_it_should_be() -> None:
    script = Path(__file__).with_name("run.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=3000, check=False
    )
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip().removeprefix("skipped: "))
    assert done.returncode == 0, done.stdout + done.stderr
