"""Runs code that imports plugins in a child process, because a plugin may end the process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from vllm_fl.errors import VllmFLError
from vllm_fl.plugins import breadcrumb, calling

from ._progress import current_progress

PATIENCE = 120.0
"""Seconds for one import or hook; the first import of torch from a network disk takes a minute."""

BEAT = 0.2
"""Seconds between two checks of the child."""


class LoadingError(VllmFLError):
    """The process that loads plugins ended without an answer."""

    code = "FL205"


def surviving(
    work: Callable[[], dict[str, Any]], ended: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the JSON-able result of `work`, from a forked child.

    If a plugin ends the child (`os._exit`, an abort) or hangs, `work` is repeated without it, and
    the plugin is shown as failed.

    `ended` maps a plugin to how it ended a child. A plugin that ends this child is added.

    Raises:
        LoadingError: the child ended while no known plugin was running.
        VllmFLError: `work` raised.
    """
    ended = {} if ended is None else ended
    while True:
        answer, end, what = _once(work, ended)
        if answer:
            break
        call, _, owner = what.partition(" of ")
        if not owner.startswith("plugin ") or owner in ended:
            during = f" while running {what}." if what else " while no plugin was running."
            raise LoadingError(f"the process that loads the plugins {end}{during}")
        ended[owner] = f"{call} {end}"
    found: dict[str, Any] = json.loads(answer)
    if error := found.get("error"):
        raise VllmFLError(error["message"], code=error["code"])
    return found


def _once(work: Callable[[], dict[str, Any]], ended: dict[str, str]) -> tuple[bytes, str, str]:
    """Run one child; return (its answer, how it ended, what it was running)."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    answer, is_late = b"", False
    with reader, tempfile.TemporaryDirectory() as notes:
        child = fork.Process(target=_answer, args=(work, writer, notes, ended))
        child.start()
        writer.close()
        before, since = None, time.monotonic()
        try:
            # EOF may never come, because a process that a plugin started may keep the pipe open.
            while not reader.poll(BEAT) and child.exitcode is None:
                crumb = breadcrumb.last(Path(notes))
                if crumb != before:
                    before, since = crumb, time.monotonic()
                current_progress.tick(crumb.what if crumb is not None else "")
                is_late = crumb is not None and time.monotonic() - since > PATIENCE
                if is_late:
                    break
            if reader.poll():
                answer = reader.recv_bytes()
        except EOFError:
            pass
        finally:
            child.kill()
            child.join()
        crumb = breadcrumb.last(Path(notes))
    code = child.exitcode or 0
    end = f"ended the process with status {code}"
    if is_late:
        end = f"did not return within {PATIENCE:.0f} s"
    elif code < 0:
        end = f"ended the process by signal {signal.Signals(-code).name}"
    return answer, end, crumb.what if crumb is not None else ""


def _answer(
    work: Callable[[], dict[str, Any]], writer: Connection, notes: str, ended: dict[str, str]
) -> NoReturn:
    """Send the answer from the child, and exit without running plugins' exit handlers."""
    os.environ[breadcrumb.FOLDER] = notes
    calling.ENDED.update(ended)
    try:
        try:
            answer = work()
        except VllmFLError as error:
            answer = {"error": {"message": error.message, "code": error.code}}
        writer.send_bytes(json.dumps(answer).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)
