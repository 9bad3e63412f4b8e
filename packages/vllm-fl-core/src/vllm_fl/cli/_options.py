"""Options that several verbs have: a device, names of what is installed, a number of seconds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ..settings.policy import closest
from ._show import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["check_known", "device_of", "positive_seconds"]


def check_known(what: str, asked: Sequence[str] | None, known: Collection[str]) -> None:
    """Raise UsageError where something that was asked for is not installed.

    Args:
        what: what it is, as its option has it: "op" of `--op`.
        asked: the names, or None.
        known: those that there are.
    """
    for name in asked or ():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"--{what} {name}: no such {what} is installed.{closest(name, known)} "
                f"Known: {listed}."
            )


def device_of(name: str | None) -> torch.device:
    """The device that was asked for, or this machine's accelerator, or the CPU.

    Raises:
        UsageError: it cannot be used, or torch cannot.
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


def positive_seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds
