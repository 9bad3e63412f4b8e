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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["changed", "restore", "state_of"]


def state_of(device: torch.device) -> dict[str, Any]:
    """What is set now, by the name that a person would use for it."""
    state = {
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "the deterministic mode": DETERMINISTIC[torch.get_deterministic_debug_mode()],
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
    for name, now in _otherwise(before, device):
        told_apart = not isinstance(now, torch.Tensor | dict)
        return f"{name} from {before[name]} to {now}" if told_apart else name
    return None


def restore(before: dict[str, Any], device: torch.device) -> None:
    """Set as it was what is set otherwise now, and touch nothing else.

    A server may watch a setter, or have taken it away: vLLM's worker on a CPU warns of each call
    of `torch.set_num_threads`.
    """
    for name, _ in _otherwise(before, device):
        then = before[name]
        if name in _SETTERS:
            _SETTERS[name](then)
        else:
            torch.get_device_module(device).set_rng_state(then, device)


def _otherwise(before: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Any]]:
    """What is set otherwise than `before`, each with its value now."""
    for name, now in state_of(device).items():
        then = before[name]
        same = torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
        if not same:
            yield name, now


DETERMINISTIC = ("off", "on, with warnings", "on")
"""torch's modes, by the number that it has for each."""


def _set_threads(number: int) -> None:
    torch.set_num_threads(number)  # looked up here: a server may have put its own in its place


def _set_deterministic(mode: str) -> None:
    # set_deterministic_debug_mode would leave the compiler's own switch as it is
    torch.use_deterministic_algorithms(mode != DETERMINISTIC[0], warn_only=mode == DETERMINISTIC[1])


def _set_device(place: torch.device) -> None:
    # None: without the mode that another default costs at every call
    torch.set_default_device(None if place == torch.device("cpu") else place)


def _set_folder(path: str | None) -> None:
    if path is not None:
        os.chdir(path)


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


_SETTERS: Mapping[str, Callable[[Any], object]] = {
    "the default dtype": torch.set_default_dtype,
    "the number of threads": _set_threads,
    "the deterministic mode": _set_deterministic,
    "the precision of float32 products": torch.set_float32_matmul_precision,
    "the random numbers of the CPU": torch.set_rng_state,
    "the default device": _set_device,
    "autocast": lambda on: torch.set_autocast_enabled("cpu", on),
    "the garbage collector's being on": lambda on: gc.enable() if on else gc.disable(),
    "the level up to which logging is off": logging.disable,
    "the working directory": _set_folder,
    "the signal handlers": _set_handlers,
}
"""What sets each of them; a device's random numbers are set by its own module."""
