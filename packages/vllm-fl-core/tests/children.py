"""Run scripts that import vLLM once, and then a part of the script per forked child."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import forked

__all__ = ["run_each"]

Bodies = Mapping[str, tuple[str, Mapping[str, str]]]
"""Name -> code, and environment variables that the child gets in addition."""


def run_each(head: str, bodies: Bodies, env: Mapping[str, str]) -> dict[str, str]:
    """Run `head`, then fork a child for each body; return name -> output."""
    with TemporaryDirectory() as folder:
        done = forked.call(_run, head, dict(bodies), folder, env=env)
        assert done.returncode == 0, done.stderr[-5000:]
        return {name: Path(folder, name).read_text(errors="replace") for name in bodies}


def _run(head: str, bodies: Bodies, folder: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(head, "<head>", "exec"), names)
    for name, (code, variables) in bodies.items():
        output = Path(folder, name)
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            file = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1), os.dup2(file, 2)
            os.environ.update(variables)
            status = 0
            try:
                exec(compile(code, "<body>", "exec"), names)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"{name}: status {status}\n{output.read_text()[-4000:]}"
