"""Read from an engine's log how it ended: the exception, and the functions of its stacks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_fl.text import clean

__all__ = ["Failure", "read_log"]

PREFIX = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:\([^)]*pid=\d+\) ?)?"
    r"(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ (?:\[[^\]]*\] ?)?)?"
)
"""The rank, process, level, time and source that PyTorch and vLLM write before a line."""

SURVIVED = ("DEBUG", "INFO", "WARNING")
"""Levels of exceptions that ended no process."""

TRACEBACK = "Traceback (most recent call last):"

FATAL = re.compile(r"(?:Fatal Python error: .*|.*terminate called.*|Segmentation fault.*)")

FRAME = re.compile(r'^ *File "([^"]+)", line \d+,? in (\S+)')

GENERIC = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization")
"""Exceptions of a parent process whose child failed."""

OTHERS = re.compile(
    r"/(?:torch|vllm|vllm_fl|vllm_fl_tools|triton|pluggy)/|/lib/python3[.\d]*/(?!site-)"
)
"""Files whose functions may have the name of an operator, and belong to no plugin."""

Frames = list[tuple[str, str]]
"""(file, function), the innermost first."""


@dataclass(frozen=True)
class Failure:
    """How an engine ended.

    Args:
        why: the exception or the signal; empty if the log has neither.
        functions: (file, function) of all stacks without those of vLLM and PyTorch, the innermost
            first.
    """

    why: str
    functions: tuple[tuple[str, str], ...] = ()


def read_log(text: str) -> Failure:
    """Read the log of an engine that failed."""
    every = [(PREFIX.match(line), line) for line in text.splitlines()]
    lines = [
        line[found.end() :].rstrip()
        for found, line in every
        if found is not None and found[1] not in SURVIVED
    ]
    dumps = _dumps(lines)
    raised = [each for each in _tracebacks(lines) if not GENERIC.search(each[0])][::-1]
    # A process that only waited for another one has no frame of a plugin.
    ends = [*(each for each in dumps if each[1]), *dumps, *raised]
    functions = [frame for _, frames in (*dumps, *raised) for frame in frames]
    return Failure(clean(ends[0][0]) if ends else "", tuple(dict.fromkeys(functions)))


def _tracebacks(lines: list[str]) -> list[tuple[str, Frames]]:
    """(exception, frames) of each traceback."""
    found = []
    for start, line in enumerate(lines):
        if line.strip() != TRACEBACK:
            continue
        end = start + 1
        while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
            end += 1
        if end < len(lines):
            found.append((lines[end].strip(), _frames(lines[start:end])[::-1]))
    return found


def _dumps(lines: list[str]) -> list[tuple[str, Frames]]:
    """(signal, frames) of each process that a signal ended."""
    found = []
    for start, line in enumerate(lines):
        if not FATAL.fullmatch(line):
            continue
        at = next((n for n in range(start, len(lines)) if "Current thread" in lines[n]), None)
        if at is None:
            continue
        end = at + 1
        while end < len(lines) and FRAME.match(lines[end]):
            end += 1
        found.append((line.strip(), _frames(lines[at:end])))
    return found


def _frames(lines: list[str]) -> Frames:
    frames = [(found[1], found[2]) for line in lines if (found := FRAME.match(line))]
    return [(file, function) for file, function in frames if not OTHERS.search(file)]
