"""Backend that replaces PyTorch's operators; REPLACES_ATEN selects its fault.

"abort index_select"       the replacement ends the process when it is called
"nan _log_softmax"         its result is incorrect
"together argmax erfinv"   replacements that fail only together
"op"                       the implementation of an op ends the process
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import correct
import torch
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
replaced: set[str] = set()


def replacement(name: str) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if FAULT == "together" and {*NAMES} <= replaced and name in NAMES:
            raise RuntimeError("device fault: two kernels use the same buffer")
        result = REPLACED[name](*args, **kwargs)
        if FAULT == "abort" and name in NAMES:
            os.abort()
        return result * float("nan") if FAULT == "nan" and name in NAMES else result

    call.__code__ = call.__code__.replace(co_name=name)  # the name in stack traces
    return call


def silu_and_mul(obj: Any, x: Tensor) -> Tensor:
    if FAULT == "op":
        os.abort()
    return correct.silu_and_mul(x)


@hookimpl
def register_ops() -> list[OpImpl]:
    vendor = BackendImplKind.VENDOR
    return [OpImpl("silu_and_mul", "vendor.replacer", vendor, silu_and_mul, "replacer")]


BLACKLIST = SettingSpec[tuple[str, ...]](
    "vendor_replacer_blacklist",
    "VLLM_FL_VENDOR_REPLACER_BLACKLIST",
    (),
    in_file=True,
    names="operator",
    known=lambda: [*REPLACED],
)
TILE = SettingSpec("vendor_replacer_tile", "VLLM_FL_VENDOR_REPLACER_TILE", "64", in_file=True)


@hookimpl
def settings() -> tuple[SettingSpec[Any], ...]:
    return (BLACKLIST, TILE)


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport:
    values = context.settings
    if values[TILE.key].value != "64":
        raise RuntimeError(f"a tile of {values[TILE.key].value} is larger than the cache")
    names = [name for name in REPLACED if name not in values[BLACKLIST.key].value]
    for name in names if not replaced else ():
        library.impl(name, replacement(name), "CPU")
        replaced.add(name)
    return WorkerReport((f"replaces: {len(names)} operators",), {"aten": names})
