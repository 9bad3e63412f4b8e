"""State of the process that a kernel must not change.

It consists of torch's modes, switches and random numbers, the working directory, signal handlers
and limits, Python's garbage collector and logging. The grad mode is not included, because kernels
are called in inference mode, which restores it.

A change is attributed to the kernel unless it also happens while the kernel is not called. In that
case it belongs to another thread and is not restored. Any thread may advance the random number
generators. Therefore the kernel is blamed for them only if each of some further calls changes them.
A number is drawn before each of these calls, because a kernel that seeds a generator sets the same
state in every call.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack as _modes
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from vllm_fl.logs import get_logger

log = get_logger("engine")

ROUNDS = 6
"""Number of observations without a call, and after a call. A thread that draws random numbers half
of the time is mistaken for the kernel with probability 1 / 4 ** ROUNDS."""

QUIET = 0.03
"""Minimum seconds of the observation without a call.

After a longer call, it lasts as long as the call, but at most `LONGEST`.
"""

LONGEST = 0.5

LONG = (torch.Tensor, dict, tuple, set)
"""Types of values that are too long for a message."""

LOOKS = 20
"""Observations during the time without a call. There are several, because another thread may set
state and restore it."""


class _Piece(NamedTuple):
    """One compared piece of state.

    Args:
        name: name for messages.
        get: reads the state. If it raises, `UNREADABLE` is the compared value: torch cannot report
            the older form of a precision that was set in the newer form.
        set: sets the state. Not called for state that could not be read.
        draw: advances a random number generator.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    draw: Callable[[], object] | None = None


class _Unreadable(str):
    """Value of state that cannot be read."""


UNREADABLE = _Unreadable("an unreadable value")


@dataclass
class State:
    """State at one moment, and the origin of later changes.

    Args:
        others: names of state that other threads have changed.
        blamed: names of state that the kernel has changed.
    """

    values: dict[str, Any]
    others: set[str] = field(default_factory=set)
    blamed: set[str] = field(default_factory=set)


def state_of(device: torch.device) -> State:
    return State({piece.name: _read(piece) for piece in _pieces(device)})


def changed(
    before: State, device: torch.device, again: Callable[[], object] | None = None
) -> str | None:
    """Return the first state that a kernel changed, with both values, or None.

    Args:
        again: repeats calls. Without it, changes of random numbers cannot be attributed to the
            kernel and are ignored.
    """
    _judge(before, device, again)
    for piece, now in _otherwise(before, device):
        if piece.name in before.blamed:
            then = before.values[piece.name]
            is_long = isinstance(then, LONG) or isinstance(now, LONG)
            return piece.name if is_long else f"{piece.name} from {then} to {now}"
    return None


def restore(before: State, device: torch.device) -> None:
    """Restore only the state that the kernel has changed. A server may watch or replace a setter:
    vLLM's CPU worker warns of each call of `torch.set_num_threads`."""
    _judge(before, device, None)
    # Each is read after the previous ones are set, because some are defaults of others.
    for piece, _ in _otherwise(before, device):
        then, name = before.values[piece.name], piece.name
        is_others = name in before.others or (piece.draw and name not in before.blamed)
        if is_others or isinstance(then, _Unreadable):  # other pieces have these values
            continue
        try:
            piece.set(then)
        except Exception as error:  # for example a limit that only root can raise
            log.warning("A kernel changed %s, and restoring it failed: %s", name, error)


def _judge(before: State, device: torch.device, again: Callable[[], object] | None) -> None:
    known = before.others | before.blamed
    suspects = {piece for piece, _ in _otherwise(before, device) if piece.name not in known}
    if again is None:
        suspects = {piece for piece in suspects if not piece.draw}
    found = {piece.name for piece in _of_others(suspects, again)}
    before.others |= found
    before.blamed |= {piece.name for piece in suspects} - found
    for name in sorted(found):
        log.info("Not only kernel calls change %s; the kernel is not blamed for it", name)


def _of_others(suspects: set[_Piece], again: Callable[[], object] | None) -> set[_Piece]:
    """Return the pieces that other threads change, by the rule in the module docstring."""
    found: set[_Piece] = set()
    quiet = QUIET
    for _ in range(ROUNDS):
        left = suspects - found
        if not left:
            break
        then = {piece: _read(piece) for piece in left}
        for _ in range(LOOKS):
            # Random intervals avoid a rhythm in step with other threads.
            time.sleep(quiet / LOOKS * random.SystemRandom().uniform(1, 2))
            found |= {piece for piece in left if not _same(then[piece], _read(piece))}
        moving = {piece: _read(piece) for piece in left - found if piece.draw}
        if not moving or again is None:
            continue
        drawn = {}
        for piece in moving:
            with suppress(Exception):  # a kernel may have left modes enabled
                piece.draw and piece.draw()
            drawn[piece] = _read(piece)
        begun = time.monotonic()
        with suppress(Exception):  # errors of calls are reported elsewhere
            again()
        quiet = min(max(QUIET, time.monotonic() - begun), LONGEST)
        for piece in {piece for piece, was in drawn.items() if _same(was, _read(piece))}:
            piece.set(moving[piece])  # undo our draw, which was the only change
            found.add(piece)
    return found


def _otherwise(before: State, device: torch.device) -> Iterator[tuple[_Piece, Any]]:
    """Yield changed state with its current value. Each piece is read only when it is due."""
    for piece in _pieces(device):
        now = _read(piece)
        if not _same(before.values[piece.name], now):
            yield piece, now


def _read(piece: _Piece) -> Any:
    try:
        return piece.get()
    except Exception:
        return UNREADABLE


def _same(then: Any, now: Any) -> bool:
    if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor):
        return torch.equal(then, now)
    if isinstance(then, dict) and isinstance(now, dict):  # additional entries do not count
        return all(now.get(key) == value for key, value in then.items())
    return bool(type(then) is type(now) and then == now)


DETERMINISTIC = ("off", "on, with warnings", "on")


def _deterministic() -> str:
    return DETERMINISTIC[torch.get_deterministic_debug_mode()]


def _set_deterministic(mode: str) -> None:
    # set_deterministic_debug_mode would not change the compiler's switch.
    torch.use_deterministic_algorithms(mode != DETERMINISTIC[0], warn_only=mode == DETERMINISTIC[1])


def _set_threads(number: int) -> None:
    torch.set_num_threads(number)  # looked up now, because a server may have replaced it


def _set_device(place: torch.device) -> None:
    # First leave additional modes, such as that of a `with torch.device(...)` that was not exited.
    while torch.get_default_device() != place and any(map(_is_left_on, modes := _modes())):
        last = next(mode for mode in reversed(modes) if _is_left_on(mode))
        for _ in modes:
            _pop_mode()
        for mode in modes:
            if mode is not last:
                _push_mode(mode)
    if torch.get_default_device() != place:
        # None avoids the mode of a different default, which slows down every call.
        torch.set_default_device(None if place == torch.device("cpu") else place)


def _is_left_on(mode: object) -> bool:
    """Whether a mode is the device of a `with` block, not of `torch.set_default_device`."""
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return isinstance(mode, DeviceContext) and mode is not default


def _function_modes() -> tuple[Any, ...]:
    """Return this thread's active modes, without the default device."""
    return tuple(mode for mode in _modes() if not isinstance(mode, DeviceContext))


def _dispatch_modes() -> tuple[Any, ...]:
    return tuple(_get_current_dispatch_mode_stack())


def _set_modes(now: Callable[[], tuple[Any, ...]], then: tuple[Any, ...]) -> None:
    on = now()
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(on, then, strict=False)))
    for mode in reversed(on[shared:]):
        mode.__exit__(None, None, None)
    for mode in then[shared:]:
        mode.__enter__()


SIGNALS = tuple(signal.valid_signals())


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in SIGNALS}


def _set_handlers(handlers: dict[int, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows it only in the main thread
    for number, handler in handlers.items():
        # None: not installed by Python, so Python cannot restore it.
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _loggers() -> dict[logging.Logger, Any]:
    """Return the configuration of the root logger and of the loggers of vLLM and vllm-fl."""
    known = logging.root.manager.loggerDict.copy().items()
    ours = [each for name, each in known if name.startswith("vllm")]
    return {
        each: (each.disabled, each.level, each.propagate, (*each.filters,), (*each.handlers,))
        for each in (logging.root, *ours)
        if isinstance(each, logging.Logger)
    }


def _set_loggers(loggers: dict[logging.Logger, Any]) -> None:
    for each, values in loggers.items():
        disabled, level, propagate, filters, handlers = values
        if each.level != level:
            each.setLevel(level)
        each.disabled, each.propagate = disabled, propagate
        each.filters[:], each.handlers[:] = filters, handlers


def _umask() -> str:
    """Read the umask. os.umask would have to set it, which other threads could notice."""
    lines = Path("/proc/self/status").read_text("ascii", errors="replace").splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Umask:"))


def _of_torch_c(name: str, get: str, put: str = "") -> Iterator[_Piece]:
    """Yield a switch of torch, if this release has it. Some have several values in newer
    releases."""
    getter = getattr(torch._C, f"_get_{get}", None)
    setter = getattr(torch._C, f"_set_{put or get}", None)
    if getter and setter:
        yield _Piece(name, getter, partial(_set_each, setter))


def _reduced(kind: str) -> Iterator[_Piece]:
    name = f"reduced precision in sums of {kind} products"
    return _of_torch_c(name, f"cublas_allow_{kind}_reduced_precision_reduction")


def _set_each(put: Callable[..., object], values: Any) -> None:
    put(*values) if isinstance(values, tuple) else put(values)


PRECISIONS = (
    *((backend, "all") for backend in ("generic", "cuda", "mkldnn")),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")),
)
"""Names with an `fp32_precision`. If a name has no value, the value of `all` applies."""


def _precisions() -> Iterator[_Piece]:
    """Yield torch's precisions in their newer form, `torch.backends.cuda.matmul.fp32_precision`."""
    get: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    put: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
    for backend, op in PRECISIONS if get and put else ():
        of = ".".join(part for part in (backend, op) if part not in ("generic", "all"))
        name = f"the fp32_precision of torch.backends{of and '.'}{of}"
        yield _Piece(name, partial(get, backend, op), partial(put, backend, op))


_PIECES: tuple[_Piece, ...] = (
    # Modes are first, because they intercept all later calls of torch.
    _Piece("torch's function modes", _function_modes, partial(_set_modes, _function_modes)),
    _Piece("torch's dispatch modes", _dispatch_modes, partial(_set_modes, _dispatch_modes)),
    _Piece("the default device", torch.get_default_device, _set_device),
    _Piece("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Piece("the number of threads", torch.get_num_threads, _set_threads),
    _Piece("the deterministic mode", _deterministic, _set_deterministic),
    # The older form is first, because it sets some values of the newer form.
    _Piece(
        "the precision of float32 products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    *_of_torch_c("cuDNN's TF32", "cudnn_allow_tf32"),
    *_precisions(),
    *_of_torch_c("the accumulation of float16 products", "cublas_allow_fp16_accumulation"),
    *_reduced("fp16"),
    *_reduced("bf16"),
    *_of_torch_c("whether cuDNN is enabled", "cudnn_enabled"),
    *_of_torch_c("cuDNN's benchmark", "cudnn_benchmark"),
    *_of_torch_c("cuDNN's determinism", "cudnn_deterministic"),
    *_of_torch_c("whether oneDNN is enabled", "mkldnn_enabled"),
    *_of_torch_c("whether flash attention is enabled", "flash_sdp_enabled", "sdp_use_flash"),
    *_of_torch_c(
        "whether memory-efficient attention is enabled",
        "mem_efficient_sdp_enabled",
        "sdp_use_mem_efficient",
    ),
    *_of_torch_c("whether math attention is enabled", "math_sdp_enabled", "sdp_use_math"),
    # cuDNN's attention is not included, because vLLM's platform for CUDA disables it at import.
    _Piece(
        "torch's anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        partial(_set_each, torch.set_anomaly_enabled),
    ),
    _Piece(
        "autocast",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    _Piece(
        "the random state of the CPU",
        torch.get_rng_state,
        torch.set_rng_state,
        partial(torch.rand, 1, device="cpu"),
    ),
    _Piece(
        "whether the garbage collector is enabled",
        gc.isenabled,
        lambda on: gc.enable() if on else gc.disable(),
    ),
    _Piece(
        "the level of logging.disable",
        lambda: logging.root.manager.disable,
        logging.disable,
    ),
    _Piece("vLLM's loggers", _loggers, _set_loggers),
    _Piece("the working directory", os.getcwd, os.chdir),
    _Piece("the signal handlers", _handlers, _set_handlers),
    _Piece("the CPU affinity", partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)),
    _Piece("the umask", _umask, lambda mask: os.umask(int(mask, 8))),
    _Piece(
        "the limit of open files",
        partial(getrlimit, RLIMIT_NOFILE),
        partial(setrlimit, RLIMIT_NOFILE),
    ),
)


def _pieces(device: torch.device) -> Iterator[_Piece]:
    """Yield all compared state in the order for restoring it."""
    yield from _PIECES
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if hasattr(module, "get_rng_state"):
        get = partial(module.get_rng_state, device)
        name = f"the random state of {device}"
        draw = partial(torch.rand, 1, device=device)
        yield _Piece(name, get, lambda state: module.set_rng_state(state, device), draw)
