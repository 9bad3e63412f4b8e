"""Fork processes that have already imported torch, transformers and other imports of vLLM.

These imports are most of the ten CPU seconds of `import vllm`. Python's fork server performs them
once per test process. A forked process imports vLLM, vllm-fl and plugins itself, with its own
environment variables and path, like a new process. Use a new process to test interpreter startup
(`sitecustomize`, imported modules) and variables that Triton or torch reads on import.
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
"""Imports of the fork server; missing modules are skipped."""

ALONE = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Variables of the fork server: with one thread and without a compiler pool, forking is safe."""


def run(
    code: str, *arguments: str, env: Mapping[str, str], timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGUMENTS…` in a process of `call`."""
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
        function: a function that can be pickled.
        arguments: its arguments, which can be pickled.
        env: all environment variables of the process. PYTHONPATH is put first on its path.
        timeout: seconds until it is killed.
        merged: whether stderr is written to stdout.

    Returns:
        Its exit status, negative for a signal, and its output, including its child processes.

    Raises:
        subprocess.TimeoutExpired: it timed out.
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
    """The context of the running fork server."""
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
    vars(process)["_parent_process"] = None  # otherwise core logs as in an engine's child process
    gc.freeze()  # vLLM collects garbage often, so exclude the preloaded modules
    try:
        function(*arguments)
    except Exception:  # print the traceback and exit with 1, like an interpreter
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # processes of multiprocessing do not run them


def _execute(code: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)
