"""What of the whole process a kernel must leave as it was: torch's modes and random numbers, the
working directory, the signal handlers, Python's garbage collector and its logging.

The grad mode is none of it: a kernel is called in inference mode, which puts it back.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from typing import Any

import torch

__all__ = ["changed", "restore", "state_of"]


def state_of(device: torch.device) -> dict[str, Any]:
    """What is set now, by the name that a person would use for it."""
    state = {
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "the deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the random numbers of the CPU": torch.get_rng_state(),
        "the default device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "the garbage collector's being on": gc.isenabled(),
        "the level up to which logging is off": logging.root.manager.disable,
        "the working directory": _folder(),
        "the signal handlers": {n: signal.getsignal(n) for n in signal.valid_signals()},
    }
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if hasattr(module, "get_rng_state"):
        state[f"the random numbers of {device}"] = module.get_rng_state(device)
    return state


def changed(before: dict[str, Any], device: torch.device) -> str | None:
    """The first thing that is set otherwise than `before`, with both values; None for none."""
    for name, now in state_of(device).items():
        then = before[name]
        if isinstance(now, torch.Tensor):
            if not torch.equal(now, then):
                return name
        elif now != then:
            return name if isinstance(now, dict) else f"{name} from {then} to {now}"
    return None


def restore(before: dict[str, Any], device: torch.device) -> None:
    """Set everything as it was."""
    torch.set_default_dtype(before["the default dtype"])
    torch.set_num_threads(before["the number of threads"])
    torch.use_deterministic_algorithms(before["the deterministic mode"])
    torch.set_float32_matmul_precision(before["the precision of float32 products"])
    torch.set_rng_state(before["the random numbers of the CPU"])
    place = before["the default device"]
    if torch.get_default_device() != place:
        # None: without the mode that another default costs at every call
        torch.set_default_device(None if place == torch.device("cpu") else place)
    torch.set_autocast_enabled("cpu", before["autocast"])
    (gc.enable if before["the garbage collector's being on"] else gc.disable)()
    logging.disable(before["the level up to which logging is off"])
    if before["the working directory"] != _folder() and before["the working directory"]:
        os.chdir(before["the working directory"])
    _set_handlers(before["the signal handlers"])
    key = f"the random numbers of {device}"
    if key in before:
        torch.get_device_module(device).set_rng_state(before[key], device)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _set_handlers(handlers: dict[int, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows it there only
    for number, handler in handlers.items():
        # None: it was not installed by Python, which therefore cannot put it back
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
