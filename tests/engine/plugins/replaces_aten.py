"""A backend that replaces PyTorch's operators, as FlagGems does, and spoils a start as it is told.

    REPLACES_ATEN="abort index_select"       a replacement that ends the process when it is called
    REPLACES_ATEN="together argmax erfinv"   replacements that fail only together

`raise` fails while the operator is registered. `hang` and `nan` do so when it is called. `later`
sets a flag, and the third replaced operator after that fails, unless launches block, as a device's
fault does. `op` ends the process in the implementation of an op.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, SettingSpec, WorkerContext, WorkerReport, hookimpl

FAULT, *NAMES = os.environ.get("REPLACES_ATEN", "none").split()


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x[(slice(None),) * dim + (index,)]


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    flat, dim = (x.flatten(), 0) if dim is None else (x, dim)
    return flat.max(dim, keepdim).indices


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return x - x.logsumexp(dim, keepdim=True)


def unused(*args: Any) -> Tensor:
    raise NotImplementedError("no model calls it")


NEVER_CALLED = (
    *("erfinv", "lgamma", "digamma", "trace", "sinh", "cosh", "asinh", "acosh", "atanh", "asin"),
    *("acos", "atan", "tan", "frac", "sinc", "i0", "logit", "nextafter", "hypot", "copysign"),
    *("heaviside", "lerp.Scalar"),
)

REPLACED: dict[str, Callable[..., Tensor]] = {
    "index_select": index_select,
    "argmax": argmax,
    "_log_softmax": log_softmax,
    **dict.fromkeys(NEVER_CALLED, unused),
}

library = torch.library.Library("aten", "IMPL")

after: list[str] = []
"""The replaced operators that have run since the fault of one."""

replaced: set[str] = set()


def replacement(name: str) -> Callable[..., Tensor]:
    """The function for an operator of this name, with the fault that it was told to have."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        if FAULT == "later" and after:
            after.append(name)
            if len(after) == 4:
                raise RuntimeError("device fault: an illegal memory access was encountered")
        if name in NAMES and FAULT != "together":
            return fail(REPLACED[name](*args, **kwargs))
        if FAULT == "together" and {*NAMES} <= replaced and name in NAMES:
            raise RuntimeError("device fault: two kernels use the same buffer")
        return REPLACED[name](*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=name)  # which stacks show
    return call


def fail(result: Tensor) -> Tensor:
    match FAULT:
        case "abort":
            os.abort()
        case "hang":
            time.sleep(100_000)
        case "nan":
            return result * float("nan")
        case "later":
            if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
                raise RuntimeError("device fault: an illegal memory access was encountered")
            after.append("the fault")
    return result


def silu_and_mul(obj: Any, x: Tensor) -> Tensor:
    if FAULT == "op":
        os.abort()
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


@hookimpl
def register_ops() -> list[OpImpl]:
    vendor = BackendImplKind.VENDOR
    return [OpImpl("silu_and_mul", "vendor.replacer", vendor, silu_and_mul, "replacer")]


def known() -> Iterable[str]:
    return [*REPLACED]


WHITELIST = SettingSpec[tuple[str, ...] | None](
    "vendor_replacer_whitelist",
    "VLLM_FL_VENDOR_REPLACER_WHITELIST",
    None,
    in_file=True,
    names="operator",
    excludes="vendor_replacer_blacklist",
)
BLACKLIST = SettingSpec[tuple[str, ...]](
    "vendor_replacer_blacklist",
    "VLLM_FL_VENDOR_REPLACER_BLACKLIST",
    (),
    in_file=True,
    names="operator",
    known=known,
)
TILE = SettingSpec("vendor_replacer_tile", "VLLM_FL_VENDOR_REPLACER_TILE", "64", in_file=True)


@hookimpl
def settings() -> tuple[SettingSpec[Any], ...]:
    return (WHITELIST, BLACKLIST, TILE)


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport:
    told = context.settings
    if told[TILE.key].value != "64":
        raise RuntimeError(f"a tile of {told[TILE.key].value} is larger than the cache")
    white = told[WHITELIST.key].value
    names = REPLACED if white is None else [name for name in REPLACED if name in white]
    names = [name for name in names if name not in told[BLACKLIST.key].value]
    for name in names if not replaced else ():
        if FAULT == "raise" and name in NAMES:
            raise RuntimeError(f"the kernel of aten::{name} does not compile")
        library.impl(name, replacement(name), "CPU")
        replaced.add(name)
    return WorkerReport((f"replaces: {len(names)} operators",), {"aten": names})
