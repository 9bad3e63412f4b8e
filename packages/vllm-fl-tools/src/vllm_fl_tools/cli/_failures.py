"""What an engine's log says of how it ended: the exception, and the stacks, the innermost first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_fl.text import clean

__all__ = ["Failure", "read_log"]

PREFIX = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:\([^)]*pid=\d+\) ?)?"
    r"(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ (?:\[[^\]]*\] ?)?)?"
)
"""What PyTorch and vLLM put before each line: the rank, the process, the level, time and place."""

LIVED_ON = ("DEBUG", "INFO", "WARNING")
"""Levels at which an exception is told that ended nothing."""

TRACEBACK = "Traceback (most recent call last):"

FATAL = re.compile(r"(?:Fatal Python error: .*|.*terminate called.*|Segmentation fault.*)")

FRAME = re.compile(r'^ *File "([^"]+)", line \d+,? in (\S+)')

GENERIC = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization")
"""What the processes above say when one beneath them has failed."""

OTHERS = re.compile(
    r"/(?:torch|vllm|vllm_fl|vllm_fl_tools|triton|pluggy)/|/lib/python3[.\d]*/(?!site-)"
)
"""Files whose functions have the names of operators, and are none of a plugin's."""

SHOWN = 16
"""Lines of a stack that are kept, the innermost."""

FOLDER = re.compile(r'(?<=File ")[^"]*/(?:site-packages|lib/python[\d.]+)/')
"""Where packages lie, which tells nothing and may have the user's name in it."""


@dataclass(frozen=True)
class Failure:
    """What a log says.

    Args:
        why: the exception, or how the process ended; empty where the log does not say.
        stack: the lines of the exception's traceback, or of the process's last stack.
        functions: (file, function) of all stacks but for those of vLLM and PyTorch, the innermost
            first.
    """

    why: str
    stack: tuple[str, ...] = ()
    functions: tuple[tuple[str, str], ...] = ()


def read_log(text: str) -> Failure:
    """What the log of an engine that failed says."""
    every = [(PREFIX.match(line), line) for line in text.splitlines()]
    lines = [
        line[found.end() :].rstrip()
        for found, line in every
        if found is not None and found[1] not in LIVED_ON
    ]
    told = [(why, stack) for why, stack in _tracebacks(lines) if not GENERIC.search(why)]
    dumps = _dumps(lines)
    functions = [frame for _, stack in reversed(told) for frame in reversed(_frames(stack))]
    functions = [frame for _, stack in dumps for frame in _frames(stack)] + functions
    telling = [dump for dump in dumps if _frames(dump[1])]  # not of a process that only waits
    why, stack = (telling or dumps or told[-1:] or [("", [])])[0]
    shown = stack[:SHOWN] if telling or dumps else stack[-SHOWN:]
    shown = [FOLDER.sub("", line) for line in shown]
    return Failure(clean(why), tuple(shown), tuple(dict.fromkeys(functions)))


def _tracebacks(lines: list[str]) -> list[tuple[str, list[str]]]:
    """(exception, the traceback's lines with it) of each."""
    found = []
    for start, line in enumerate(lines):
        if line.strip() != TRACEBACK:
            continue
        end = start + 1
        while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
            end += 1
        if end < len(lines):
            found.append((lines[end].strip(), lines[start : end + 1]))
    return found


def _dumps(lines: list[str]) -> list[tuple[str, list[str]]]:
    """(how a process ended, its stack) of each that a signal has ended."""
    found = []
    for start, line in enumerate(lines):
        if not FATAL.fullmatch(line):
            continue
        current = next((n for n in range(start, len(lines)) if "Current thread" in lines[n]), None)
        if current is None:
            continue
        end = current + 1
        while end < len(lines) and FRAME.match(lines[end]):
            end += 1
        found.append((line.strip(), lines[current:end]))
    return found


def _frames(stack: list[str]) -> list[tuple[str, str]]:
    frames = [(found[1], found[2]) for line in stack if (found := FRAME.match(line))]
    return [(file, function) for file, function in frames if not OTHERS.search(file)]
