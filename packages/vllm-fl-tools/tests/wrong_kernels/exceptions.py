"""Kernels that raise, hang, crash, or decline calls incorrectly."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from typing import Any

import torch
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong, wrong_kernel

LARGEST_UNKNOWN = {"kit": "", "why": "the kit does not know the engine's largest batch"}


class Panic(BaseException):
    """Stands in for the exception of a Rust extension that panics."""


class Unprintable(Exception):
    """Exception that raises when it is printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


wrong_supports = functools.partial(
    wrong_kernel, by=lambda op, function: (right.of(op), {"supports": function})
)
"""Add a correct kernel to the corpus: the decorated function is its `supports`."""


@wrong_kernel(SILU, "the engine crashes in the first step with 11 tokens")
def raises_at_eleven_tokens(x: Tensor) -> Tensor:
    """Raises at 11 tokens."""
    if len(x) == 11:
        raise RuntimeError("invalid configuration argument")
    return right.silu_and_mul(x)


@wrong_kernel(NORM, "the engine crashes at the first long prompt", **LARGEST_UNKNOWN)
def out_of_memory_at_the_largest_batch(x, residual, weight, epsilon, variance_size=None):
    """Runs out of memory at the largest batch."""
    if len(x) >= 2048:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB of workspace")
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(SILU, "the server exits with status 0", apart=True, kit="values")
def fn_raises_system_exit(x: Tensor) -> Tensor:
    """Raises SystemExit at 1 token."""
    if len(x) == 1:
        raise SystemExit(0)
    return right.silu_and_mul(x)


@wrong_kernel(GELU, "the server crashes", apart=True, kit="values")
def fn_panics(x: Tensor, approximate: str = "none") -> Tensor:
    """Panics at 1 token."""
    if len(x) == 1:
        raise Panic("called `Option::unwrap()` on a `None` value")
    return right.gelu_and_mul(x, approximate)


@wrong_kernel(NORM, "requests are reported as cancelled", apart=True, kit="values")
def fn_is_cancelled(x, residual, weight, epsilon, variance_size=None):
    """Raises CancelledError at 1 token."""
    if len(x) == 1:
        raise asyncio.CancelledError
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(
    SILU, "the engine fails to start, without naming the kernel", apart=True, kit="values"
)
def raises_the_unprintable(x: Tensor) -> Tensor:
    """Raises an exception that cannot be printed."""
    if len(x) == 1:
        raise Unprintable
    return right.silu_and_mul(x)


@wrong_supports(
    SILU,
    "the engine fails to start with \"KeyError: 'gfx942'\", without naming the kernel",
    apart=True,
    kit="values",
)
def supports_raises_key_error(x: Tensor) -> Any:
    """`supports` raises KeyError."""
    raise KeyError("gfx942")


@wrong_supports(
    SILU, "startup exits with status 0, without naming the kernel", apart=True, kit="values"
)
def supports_raises_system_exit(x: Tensor) -> Any:
    """`supports` raises SystemExit."""
    raise SystemExit(0)


@wrong_supports(
    SILU, "the engine fails to start, without naming the kernel", apart=True, kit="values"
)
def supports_panics(x: Tensor) -> Any:
    """`supports` panics."""
    raise Panic("index out of bounds")


@wrong_supports(
    SILU,
    "each call raises an exception; if it is not caught, the engine crashes",
    apart=True,
    kit="serving",
)
def supports_raises_not_implemented(x: Tensor) -> Any:
    """`supports` raises NotImplementedError instead of returning a reason."""
    raise NotImplementedError


@wrong_supports(
    NORM,
    "another implementation runs than the start line shows; correct if that one is",
    kit="",
    why="an unsupported call falls back to the next implementation, which is also verified; the "
    "kit tries three batch sizes",
    start=False,
)
def supports_lies_by_batch_size(x, residual, weight, epsilon, variance_size=None):
    """`supports` declines 400 to 2047 tokens."""
    if x.device.type != "cpu":
        return "no kernel but for the CPU"
    return "too busy" if 400 <= len(x) <= 2047 else True


@wrong_supports(SILU, "activations are halved before every layer")
def supports_overwrites(x: Tensor) -> Any:
    """`supports` scales the input in place."""
    if x.device.type != "cpu":
        return "no kernel but for the CPU"
    if x.is_floating_point():
        x.mul_(0.5)
    return True


@wrong_supports(GELU, "the kernel never runs, and the logged reason is: yes", kit="serving")
def supports_answers_yes(x: Tensor, approximate: str = "none") -> Any:
    """`supports` returns 'yes' instead of True."""
    return "yes"


@wrong(NORM, "the fallback adds x twice: nonsense for prompts")
def refuses_after_writing() -> Any:
    """Overwrites the residual before it declines calls of more than 16 tokens."""

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        if residual is not None and len(x) > 16:
            residual.add_(x)
            raise NotImplementedError("only for decoding")
        return right.rms_norm(x, residual, weight, epsilon, variance_size)

    return rms_norm, {"consumes": frozenset({"x", "residual"})}


@wrong_kernel(
    ROTARY,
    "with three concurrent users the query is rotated twice",
    kit="",
    why="the kit does not know the served sizes",
)
def refuses_after_turning(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Declines 3 tokens after it has rotated half of the query."""
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    if len(query) == 3 and query.shape[-1] == 32:
        query[:, :2].copy_(q[:, :2])
        raise NotImplementedError("three tokens")
    return q, k


@wrong_kernel(
    SILU,
    "the server hangs; clients time out",
    why="a call that never returns cannot be interrupted: startup hangs, and the log names the "
    "call while it runs",
    apart=True,
    deadline=10.0,
    impatient=True,
    start=False,
)
def stalls_at_eleven_tokens(x: Tensor) -> Tensor:
    """Hangs at 11 tokens."""
    if len(x) == 11:
        threading.Event().wait()
    return right.silu_and_mul(x)


@wrong_kernel(
    GELU,
    "a long prompt stops all requests for minutes",
    **LARGEST_UNKNOWN,
    apart=True,
    impatient=True,
)
def slow_at_the_largest_batch(x: Tensor, approximate: str = "none") -> Tensor:
    """Needs 11 s for each call with the largest batch."""
    if len(x) == 2048:
        time.sleep(SECONDS[0])
    return right.gelu_and_mul(x, approximate)


SECONDS = [11.0]
"""Duration of a slow call. Tests that shorten the watchdog shorten this as well."""


@wrong_supports(
    SILU,
    "each full prefill chunk stalls the server before the kernel runs",
    **LARGEST_UNKNOWN,
    impatient=True,
    apart=True,
)
def slow_supports_at_the_largest_batch(x: Tensor) -> bool | str:
    """`supports` needs 11 s with the largest batch."""
    if len(x) == 2048:
        time.sleep(SECONDS[0])
    return x.device.type == "cpu" or "it runs on a CPU"


@wrong_supports(
    NORM,
    "each step of a single user stalls the server",
    kit="",
    why="only verification at startup watches `supports`, not the checks of the kit",
    impatient=True,
    apart=True,
)
def slow_supports_at_one_token(x, residual, weight, epsilon, variance_size=None):
    """`supports` needs 11 s for each input of one row."""
    if len(x) == 1:
        time.sleep(SECONDS[0])
    return x.device.type == "cpu" or "it runs on a CPU"


@wrong_kernel(
    SILU,
    "the server exits without an error message",
    why="the process does not survive it",
    apart=True,
    start=False,
)
def ends_the_process(x: Tensor) -> Tensor:
    """Ends the process at 1 token (`os._exit`)."""
    if len(x) == 1:
        os._exit(0)
    return right.silu_and_mul(x)


@wrong_kernel(
    NORM, "the server crashes", why="the process does not survive it", apart=True, start=False
)
def aborts(x, residual, weight, epsilon, variance_size=None):
    """Aborts at 1 token, like a failed assertion of a C++ library."""
    if len(x) == 1:
        os.abort()
    return right.rms_norm(x, residual, weight, epsilon, variance_size)


@wrong_kernel(ROTARY, "the engine crashes in the first step with 16 tokens", kit="values")
def recurses(query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Recurses infinitely at 16 tokens."""
    if len(query) == 16:
        return recurses(query, key, cos, sin, position_ids, rotary_interleaved)
    return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
