"""Run a step in a thread of its own, within a limit: one that waits for a lost rank never ends."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

import torch

from ..text import quote

LIMIT = 120.0
"""Seconds for one step: making a group of many machines takes some; one that never ends is a
fault, and must be told from it."""


def fault_of(step: Callable[[], str | None], device: torch.device) -> tuple[str, bool]:
    """What is wrong with one step, and whether it is still running.

    It runs in a thread of its own, as one that waits for a lost rank may never end.

    Args:
        step: returns what is wrong, or nothing; what it raises is wrong, too.
        device: what the step's thread uses.
    """
    told: list[str] = []

    def run() -> None:
        try:
            if device.type != "cpu":
                torch.get_device_module(device.type).set_device(device)
            told.append(step() or "")
        except BaseException as error:  # a library's wrapper may raise anything
            told.append(quote(error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), daemon=True, name="vllm-fl groups")
    thread.start()
    thread.join(LIMIT)
    if thread.is_alive():
        return f"it did not end within {LIMIT:g} s", True
    return told[0], False
