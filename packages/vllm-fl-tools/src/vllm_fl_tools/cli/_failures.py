"""Reads from an engine's log how it ended: the exception, and the functions of its stacks."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_fl.text import clean

PREFIX = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:\([^)]*pid=\d+\) ?)?"
    r"(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ (?:\[[^\]]*\] ?)?)?"
)
"""Prefix of a log line from PyTorch or vLLM: rank, process, level, time and source."""

SURVIVED = ("DEBUG", "INFO", "WARNING")
"""Log levels of exceptions that did not end a process."""

TRACEBACK = "Traceback (most recent call last):"

FATAL = re.compile(r"(?:Fatal Python error: .*|.*terminate called.*|Segmentation fault.*)")

FRAME = re.compile(r'^ *File "([^"]+)", line \d+,? in (\S+)')

GENERIC = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization")
"""Exceptions that the parent of a failed process raises."""

OTHERS = re.compile(
    r"/(?:torch|vllm|vllm_fl|vllm_fl_tools|triton|pluggy)/|/lib/python3[.\d]*/(?!site-)"
)
"""Files that belong to no plugin, but may have functions named like an operator."""

StackNames = list[str]
"""Functions and modules of a stack, innermost first."""


def read_log(text: str) -> tuple[str, StackNames]:
    """Read the log of an engine that failed.

    Returns:
        (failure, names). The failure is the exception or the signal, or empty if the log has
        neither. The names are the functions and modules of all stacks, innermost first, without
        vLLM and PyTorch.
    """
    every = [(PREFIX.match(line), line) for line in text.splitlines()]
    lines = [
        line[found.end() :].rstrip()
        for found, line in every
        if found is not None and found[1] not in SURVIVED
    ]
    dumps = _dumps(lines)
    raised = [each for each in _tracebacks(lines) if not GENERIC.search(each[0])][::-1]
    # A process that only waited for another process has no frame from a plugin.
    ends = [*(each for each in dumps if each[1]), *dumps, *raised]
    names = [name for _, found in (*dumps, *raised) for name in found]
    return clean(ends[0][0]) if ends else "", [*dict.fromkeys(names)]


def _tracebacks(lines: list[str]) -> list[tuple[str, StackNames]]:
    found = []
    for start, line in enumerate(lines):
        if line.strip() != TRACEBACK:
            continue
        end = start + 1
        while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
            end += 1
        if end < len(lines):
            found.append((lines[end].strip(), _names(lines[start:end][::-1])))
    return found


def _dumps(lines: list[str]) -> list[tuple[str, StackNames]]:
    """Return (signal, names) of each process that a signal ended."""
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
        found.append((line.strip(), _names(lines[at:end])))
    return found


def _names(stack: list[str]) -> StackNames:
    frames = [(found[1], found[2]) for line in stack if (found := FRAME.match(line))]
    own = [(file, function) for file, function in frames if not OTHERS.search(file)]
    return [name for file, function in own for name in (function, Path(file).stem)]
