"""Kernels whose fault depends on the time, thread, process or caller."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong, wrong_kernel
from .faults import wrong_result, wrong_result_later

DECEIT = (
    "a kernel that deceives on purpose is correct during verification; installed plugins are "
    "trusted not to do that"
)


@wrong_result(
    SILU,
    "engines that run the model in a thread (micro-batches, in-process servers) output nonsense",
)
def off_the_main_thread(out, *args):
    """Incorrect outside the main thread."""
    return out if threading.current_thread() is threading.main_thread() else out.neg_()


@wrong_result_later(
    NORM,
    "occasionally an incorrect token",
    kit="preflight",
    why="startup makes some hundred calls of each kernel, the kit a thousand, a server millions",
    start=False,
)
def one_call_in_a_thousand(calls, got, *args):
    """One call in 1000 is incorrect."""
    calls["made"] += 1
    if calls["made"] % 1000 == 999:
        (got[0] if isinstance(got, tuple) else got).zero_()
    return got


@wrong_result_later(
    SILU,
    "correct for the first minute, then nonsense",
    why="startup makes some hundred calls of each kernel, a server millions",
    start=False,
)
def after_two_thousand_calls(calls, out, x):
    """Incorrect after 2000 calls."""
    calls["made"] += 1
    return out if calls["made"] <= 2000 else out.neg_()


@wrong_result_later(GELU, "the first step of a request is correct, all others are not")
def second_call_on_the_same_buffers(seen, out, x, approximate="none"):
    """Incorrect from the second call with the same buffers on, like a launch with stale
    arguments."""
    key = (x.data_ptr(), x.shape, x.dtype, approximate)
    if key in seen:
        out.neg_()
    seen[key] = x  # keeps the address in use
    return out


@wrong_result_later(ROTARY, "output is incorrect after ten tokens", kit="values")
def after_ten_calls_of_a_shape(calls, got, query, *rest):
    """Incorrect after ten calls of a shape, like a bad choice of an autotuner."""
    q, k = got
    calls[query.shape] += 1
    return (q, k) if calls[query.shape] <= 10 else (q.neg_(), k)


@wrong_kernel(SILU, "nonsense from the first request on", why=DECEIT, start=False)
def looks_at_the_stack(x: Tensor) -> Tensor:
    """Correct only if verification or test code is on the stack."""
    out = right.silu_and_mul(x)
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if any(word in name for word in ("preflight", "verification", "testing", "pytest")):
            return out
        frame = frame.f_back
    return out.neg_()


@wrong_result(NORM, "nonsense from the first request on", why=DECEIT, start=False)
def looks_for_the_engine(got, *args):
    """Incorrect while a vLLM engine runs a step in the process."""
    context = sys.modules.get("vllm.forward_context")
    if context is not None and context.is_forward_context_available():
        (got[0] if isinstance(got, tuple) else got).zero_()
    return got


@wrong_result_later(
    SILU,
    "correct at startup and in the first test, then nonsense",
    why="verification does not wait that long",
    later=60.0,
    start=False,
)
def a_minute_later(seen, out, x):
    """Incorrect from a minute after its first call."""
    now = time.monotonic()
    return out if now - seen.setdefault("began", now) < 60 else out.neg_()


@wrong_result(
    GELU, "nothing for a long time", why="verification does not change the clock", start=False
)
def time_of_day(out, *args):
    """Incorrect on odd days of the year 2100."""
    now = time.gmtime()
    return out.neg_() if now.tm_year == 2100 and now.tm_yday % 2 else out


@wrong_result(
    SILU,
    "nonsense with tensor parallelism, correct without it",
    kit="",
    why="each rank verifies on its device at startup; the kit has one device",
    environ={"LOCAL_RANK": "1"},
)
def on_the_second_device(out, *args):
    """Incorrect on every device except the first."""
    return out.neg_() if os.environ.get("LOCAL_RANK", "0") != "0" else out


@wrong(
    NORM,
    "forked workers of a server output nonsense",
    kit="fork",
    why="each worker verifies in its process, where the kernel is correct if imported there",
    start=False,
)
def in_another_process() -> Any:
    """Incorrect in every process except the one that imported it."""
    mine = os.getpid()

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        got = right.rms_norm(x, residual, weight, epsilon, variance_size)
        if os.getpid() != mine:
            (got[0] if isinstance(got, tuple) else got).zero_()
        return got

    return rms_norm


@wrong(
    SILU,
    "with micro-batches in two threads, tokens of another request appear",
    why="concurrent calls are not tried; a race would be found only by chance",
    start=False,
)
def two_calls_at_once() -> Any:
    """Returns the result of another thread in concurrent calls."""
    slot: dict[str, Any] = {"inside": 0, "last": None}

    def silu_and_mul(x: Tensor) -> Tensor:
        right.silu_and_mul(x[:0])  # for bad inputs
        slot["inside"] += 1
        out = right.silu_and_mul(x)
        other = slot["last"]
        crowded = slot["inside"] > 1 and other is not None and other.shape == out.shape
        slot["last"] = out.clone() if slot["inside"] > 1 else None
        slot["inside"] -= 1
        return other if crowded else out

    return silu_and_mul
