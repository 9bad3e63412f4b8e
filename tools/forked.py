"""Processes that begin where another one has imported torch, transformers and what else vLLM does.

Those are most of what `import vllm` takes, ten seconds of a core. Python's fork server imports them
once for each process of tests. What is forked from it imports vLLM, vllm-fl and plugins itself,
under variables and a path of its own, and so finds them as a fresh process does. A fresh one is
needed where an interpreter's start is looked at (`sitecustomize`, which modules are imported), and
for variables that Triton or torch reads as it is imported.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver, process
from pathlib import Path
from typing import Any

__all__ = ["call", "run"]

MODULES = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch.distributed.tensor",
    "transformers.processing_utils",
    "aiohttp",
    "fastapi",
    "openai",
]
"""What the fork server imports; what is not installed is passed over."""

ALONE = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""The fork server's variables: what is forked must have one thread, and no pool of compilers."""


def run(
    code: str, *arguments: str, env: Mapping[str, str], timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """What `python -c CODE ARGUMENTS…` does, in a process of `call`."""
    return call(_execute, code, arguments, env=env, timeout=timeout)


def call(
    function: Callable[..., object],
    *arguments: Any,
    env: Mapping[str, str],
    timeout: float = 600,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Call a module's function in a forked process.

    Args:
        function: one that can be pickled, as its arguments.
        arguments: what it is called with.
        env: all variables of the process. What PYTHONPATH names comes first on its path.
        timeout: seconds after which it is killed.
        merged: whether its stderr goes to where its stdout does.

    Returns:
        Its status, negative for a signal, and what it and its own processes printed.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    name = function.__qualname__
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        for file in files:
            file.touch()
        outputs = (files[0], files[0] if merged else files[1])
        child = _server().Process(target=_begin, args=(outputs, dict(env), function, arguments))
        child.start()
        child.join(timeout)
        if is_late := child.exitcode is None:
            child.kill()
            child.join()
        out, err = (file.read_text(errors="replace") for file in files)
    if is_late:
        raise subprocess.TimeoutExpired(name, timeout, out, err)
    return subprocess.CompletedProcess(name, child.exitcode, out, err)


@cache
def _server() -> Any:
    """The context of the fork server, which runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    before = dict(os.environ)
    os.environ.update(ALONE)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _begin(
    outputs: tuple[Path, Path],
    env: dict[str, str],
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    for number, file in enumerate(outputs, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    vars(process)["_parent_process"] = None  # else core takes it for one of an engine's own
    gc.freeze()  # vLLM collects garbage many times: not among what was imported before
    try:
        function(*arguments)
    except Exception:  # told, and its process ended, as an interpreter does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which a process that multiprocessing began leaves out


def _execute(code: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)
