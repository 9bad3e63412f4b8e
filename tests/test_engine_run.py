"""tools/engine_run.py: an engine that hangs is ended with all its processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from engine_run import EngineFailed, Job, run

HANGS = """#!/bin/sh
sleep 1000 &
echo $! > "$CHILD"
echo began
wait
"""


def test_what_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script, child = tmp_path / "python", tmp_path / "child"
    script.write_text(HANGS)
    script.chmod(0o700)
    with pytest.raises(EngineFailed) as failure:
        run(Job("none", []), timeout=1, python=str(script), CHILD=str(child))
    assert failure.value.log == "began\nit did not end within 1 s, and was killed\n"
    status = Path("/proc", child.read_text().strip(), "stat")
    deadline = time.monotonic() + 300
    while runs(status) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(status)


def runs(status: Path) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
