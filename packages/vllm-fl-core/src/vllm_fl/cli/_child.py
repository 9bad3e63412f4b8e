"""Run code that imports plugins in a child process, so that a plugin that exits ends only that."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import SettingsError, VllmFLError
from ..plugins import breadcrumb, calling
from ._progress import by_hand
from ._show import UsageError, say

__all__ = ["LoadingError", "surviving"]

PATIENCE = 120.0
"""Seconds for one import or hook; the first import of torch from a network disk takes a minute."""

BEAT = 0.2
"""Seconds between two looks at the child."""


class LoadingError(VllmFLError):
    """The process in which plugins are loaded ended without an answer."""

    code = "FL205"


def surviving(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` gives, as JSON-able data, from a forked child.

    A plugin that ends the child (`os._exit`, an abort) or hangs is noted by name, so that it is
    shown as failed, and the work begins again without it.

    Raises:
        UsageError: a setting is wrong.
        LoadingError: the child ended where no plugin of a known name ran.
        VllmFLError: what `work` raised.
    """
    ended: dict[str, str] = {}
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
    with (
        tempfile.TemporaryFile()
        if not hasattr(os, "memfd_create")
        else open(os.memfd_create("vllm-fl-running"), "r+b", buffering=0) as notes
    ):
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            breadcrumb.keep_in(notes.fileno())
            calling.ENDED.update(ended)
            _answer(work, writer)
        os.close(writer)
        try:
            text, end = _wait(pid, reader, notes.fileno(), tick)
        finally:
            os.close(reader)
        crumb = breadcrumb.read(os.pread(notes.fileno(), breadcrumb.LARGEST, 0))
    try:
        kind, value = json.loads(text)
    except ValueError:
        return None, end, crumb.what if crumb is not None else ""
    return (kind, value), end, ""


def _answer(work: Callable[[], dict[str, Any]], writer: int) -> NoReturn:
    """In the child: work, write the answer, and end without running plugins' exit handlers."""
    try:
        try:
            answer: tuple[str, Any] = ("found", work())
        except VllmFLError as error:
            kind = "settings" if isinstance(error, SettingsError) else "error"
            answer = (kind, {"message": error.message, "code": error.code})
        with open(writer, "w", encoding="utf-8") as out:
            json.dump(answer, out)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _wait(pid: int, reader: int, notes: int, tick: Callable[[str], None]) -> tuple[str, str]:
    """(what the child wrote, how it ended). One that hangs in a plugin is ended."""
    data, before, since, told = b"", b"", time.monotonic(), False
    ended: int | None = None
    killed = False
    try:
        while True:
            ready, _, _ = select.select([reader], [], [], BEAT)
            chunk = os.read(reader, 65536) if ready else None
            data += chunk or b""
            if chunk == b"":
                break
            if ended is not None and not ready:
                break  # a process that the plugin left behind holds the pipe
            if ended is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                ended = status if done else None
            now = os.pread(notes, breadcrumb.LARGEST, 0)
            if now != before:
                before, since, told = now, time.monotonic(), False
            crumb = breadcrumb.read(now)
            tick(crumb.what if crumb is not None else "")
            took = time.monotonic() - since
            if crumb is not None and took > breadcrumb.SLOW and not told:
                told = True
                say(f"vllm-fl: {crumb.what} has been running for {took:.0f} s", error=True)
            if crumb is not None and took > PATIENCE:
                killed = True
                break
    finally:
        if ended is None:
            if killed or sys.exc_info()[0] is not None:
                os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)[1]
    if killed:
        return "", f"did not come back within {PATIENCE:.0f} s"
    code = os.waitstatus_to_exitcode(ended)
    if code < 0:
        return data.decode(), f"ended the process by signal {signal.Signals(-code).name}"
    return data.decode(), f"ended the process with status {code}"
