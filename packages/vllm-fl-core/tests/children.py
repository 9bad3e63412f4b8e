"""Scripts that import vLLM once, and run a part of theirs in one child for each case."""

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


def run_each(
    head: str, bodies: Mapping[str, tuple[str, Mapping[str, str]]], env: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Run `head`, then each body in a child that is forked behind it, with its own variables.

    Args:
        head: the imports that all have in common.
        bodies: name -> the code, and the variables that its child has besides `env`.
        env: the variables of the process that runs `head`.

    Returns:
        Name -> (the last line that the child printed, all that it printed).
    """
    with TemporaryDirectory() as folder:
        done = forked.call(_run, head, dict(bodies), folder, env=env)
        assert done.returncode == 0, done.stderr[-5000:]
        texts = {name: Path(folder, name).read_text(errors="replace") for name in bodies}
    return {name: (text.rstrip().rpartition("\n")[2], text) for name, text in texts.items()}


def _run(head: str, bodies: dict[str, tuple[str, dict[str, str]]], folder: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(head, "<head>", "exec"), names)
    for name, (code, variables) in bodies.items():
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(code, names, variables, os.path.join(folder, name))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"{name}: status {status}\n{Path(folder, name).read_text()[-4000:]}"


def _child(code: str, names: dict[str, Any], variables: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    status = 1
    try:
        exec(compile(code, "<body>", "exec"), names)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
