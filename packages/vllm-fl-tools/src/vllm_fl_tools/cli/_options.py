"""Options of several verbs: a device, a file, names of installed objects, seconds."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_fl.text import closest
from vllm_fl_tools.atomic_write import Draft

from ._show import UsageError

if TYPE_CHECKING:
    import torch

MOST = 2**20


def device_of(name: str | None) -> torch.device:
    """Return the device with this name, by default this machine's accelerator or the CPU.

    Raises:
        UsageError: the device or torch cannot be used.
    """
    try:
        import torch
    except Exception as error:
        raise UsageError(f"torch cannot be imported ({error}); see `vllm-fl doctor`") from error

    if name is None:
        npu = getattr(torch, "npu", None)
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if npu is not None and npu.is_available():
            name = "npu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except Exception as error:  # torch raises RuntimeError, AssertionError, NotImplementedError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"--device {name}: {reason}") from error
    return device


def draft_of(path: str, option: str) -> Draft:
    """Return a draft of the file in an option; `put` replaces an existing file.

    Raises:
        UsageError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))  # replaces the target of a link, not the link
    try:
        if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
            raise UsageError(f"{option} {path}: not a writable regular file")
        return Draft(target)
    except OSError as error:
        raise UsageError(
            f"{option}: cannot write {path}: {error.strerror}; nothing was run"
        ) from error


def check_known(what: str, asked: Sequence[str] | None, known: Collection[str]) -> None:
    """Raise UsageError if a name is not installed. `what` is the kind: "op" for `--op`."""
    for name in asked or ():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"--{what} {name}: unknown {what}.{closest(name, known)} Known: {listed}."
            )


def counts(option: str, text: str) -> tuple[int, ...]:
    """Return the unique numbers of an option such as `--batch 1,8`.

    Raises:
        UsageError: a number is not between 1 and 2**20.
    """
    try:
        found = dict.fromkeys(int(part) for part in text.split(","))
    except ValueError:
        found = {}
    if not found or not 1 <= min(found) <= max(found) <= MOST:
        raise UsageError(f"{option} {text}: expected numbers such as 1,8, each from 1 to {MOST}")
    return tuple(found)


def takes_timeout(parser: argparse.ArgumentParser, what: str, seconds: float) -> None:
    """Add the option `--timeout` for `what`, with the default `seconds`."""
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_seconds,
        default=seconds,
        help=f"time limit of one {what}; default: {seconds:.0f}",
    )


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
