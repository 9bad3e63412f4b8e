"""Run code that imports plugins in a child process, so that a plugin that exits ends only that."""

from __future__ import annotations

import gc
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
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

from vllm_fl.errors import SettingsError, VllmFLError
from vllm_fl.plugins import breadcrumb, calling

from ._progress import by_hand
from ._show import UsageError

PATIENCE = 120.0
"""Seconds for one import or hook; the first import of torch from a network disk takes a minute."""

BEAT = 0.2
"""Seconds between two looks at the child."""


class LoadingError(VllmFLError):
    """The process in which plugins are loaded ended without an answer."""

    code = "FL205"


def surviving(
    work: Callable[[], dict[str, Any]], ended: dict[str, str] | None = None
) -> dict[str, Any]:
    """What `work` gives, as JSON-able data, from a forked child.

    A plugin that ends the child (`os._exit`, an abort) or hangs is noted by name, so that it is
    shown as failed, and the work begins again without it.

    Args:
        work: what is done there.
        ended: the plugins that have ended such a child before, and how; those that do are added.

    Raises:
        UsageError: a setting is wrong.
        LoadingError: the child ended where no plugin of a known name ran.
        VllmFLError: what `work` raised.
    """
    ended = {} if ended is None else ended
    while True:
        with by_hand() as tick:  # a process that forks has one thread
            answer, end, what = _once(work, ended, tick)
        if answer is not None:
            break
        whose = what.partition(" of ")[2]
        if not whose.startswith("plugin ") or whose in ended:
            raise LoadingError(
                f"the process that loads the plugins {end}"
                + (f" while it ran {what}." if what else "; no plugin ran at that moment.")
            )
        ended[whose] = f"{what.partition(' of ')[0]} {end}"
    kind, value = answer
    if kind == "settings":
        raise UsageError(value["message"], code=value["code"])
    if kind == "error":
        raise VllmFLError(value["message"], code=value["code"])
    found: dict[str, Any] = value
    return found


def _once(
    work: Callable[[], dict[str, Any]], ended: dict[str, str], tick: Callable[[str], None]
) -> tuple[tuple[str, Any] | None, str, str]:
    """One child: (what it answers or None, how it ended, what it ran then)."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    with reader, tempfile.TemporaryDirectory() as folder:
        notes = Path(folder)
        child = fork.Process(target=_answer, args=(work, writer, folder, ended))
        child.start()
        writer.close()
        try:
            text = _wait(child, reader, notes, tick)
        except BaseException:
            child.kill()
            raise
        finally:
            child.join()
        crumb = breadcrumb.last(notes)
    if text:
        return json.loads(text), "", ""
    code = child.exitcode or 0
    end = f"ended the process with status {code}"
    if code < 0:
        end = f"ended the process by signal {signal.Signals(-code).name}"
    if text is None:
        end = f"did not come back within {PATIENCE:.0f} s"
    return None, end, crumb.what if crumb is not None else ""


def _answer(
    work: Callable[[], dict[str, Any]], writer: Connection, notes: str, ended: dict[str, str]
) -> NoReturn:
    """In the child: work, write the answer, and end without running plugins' exit handlers."""
    os.environ[breadcrumb.FOLDER] = notes
    gc.disable()  # it ends soon
    calling.ENDED.update(ended)
    try:
        try:
            answer: tuple[str, Any] = ("found", work())
        except VllmFLError as error:
            kind = "settings" if isinstance(error, SettingsError) else "error"
            answer = (kind, {"message": error.message, "code": error.code})
        writer.send_bytes(json.dumps(answer).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _wait(
    child: ForkProcess, reader: Connection, notes: Path, tick: Callable[[str], None]
) -> bytes | None:
    """What the child answers: nothing where it ended, None where it hangs in a plugin: it is ended.

    A process that a plugin left behind may hold the pipe.
    """
    before, since = None, time.monotonic()
    while True:
        crumb = breadcrumb.last(notes)
        if crumb != before:
            before, since = crumb, time.monotonic()
        tick(crumb.what if crumb is not None else "")
        if crumb is not None and time.monotonic() - since > PATIENCE:
            child.kill()
            return None
        if reader.poll(BEAT):
            try:
                return reader.recv_bytes()
            except EOFError:
                return b""
        if child.exitcode is not None and not reader.poll():
            return b""
