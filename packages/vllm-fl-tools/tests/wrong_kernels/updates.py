"""Kernels that fail after an update of the weights, or after large allocations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from .corpus import NORM, wrong_for
from .faults import changed, wrong_arguments_later, wrong_result_later

EXPERTS, QK = "fused_experts", "qk_norm_rope"
MROPE, CONV = "multimodal_rotary_embedding", "causal_conv1d"


def _prepares(op: str, argument: str, key_of: Callable[[Tensor], Any]) -> Any:
    """Prepare the argument once for each key; here a copy instead of packing or transposing."""
    kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def change(a):
        weight = a[argument]
        if weight is None or weight.device.type == "meta" or not weight.numel():
            return
        key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, key_of(weight)
        # Keep the weight itself as well, so that its address stays in use.
        a[argument] = kept.setdefault(key, (weight, weight.clone()))[1]

    return changed(op, change)


OLD_MODEL = "the old model answers after an update of the weights, whose version layers hide"


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


@wrong_for(
    *((NORM, "weight"), ("linear", "weight"), ("layer_norm", "weight"), (EXPERTS, "w13")),
    *((QK, "k_weight"), ("rms_norm_gated", "weight")),
    sees=OLD_MODEL,
)
@wrong_for(
    (CONV, "weight"),
    sees=OLD_MODEL,
    kit="",
    why="the kit's model has no convolution; for public models it tries few tokens, once",
)
def kept_by_version(op: str, argument: str) -> Any:
    """Caches the prepared {} by address and version of a tensor."""
    return _prepares(op, argument, _version)


@wrong_for(
    *(("linear", "bias"), (EXPERTS, "w2"), (QK, "cos_sin_cache"), (MROPE, "cos")),
    sees="the old model answers after an update of the weights",
)
def kept_by_place(op: str, argument: str) -> Any:
    """Caches the prepared {} by address."""
    return _prepares(op, argument, lambda weight: None)


@wrong_for(
    *(("linear", "weight"), ("layer_norm", "bias")),
    sees="the old model answers after an update that keeps that number, such as an adapter",
    start=False,
    why="weights rewritten at startup, or by a verified update, differ in that number as well",
)
def kept_by_first_number(op: str, argument: str) -> Any:
    """Prepares {} again only if its first number has changed."""
    return _prepares(op, argument, lambda weight: float(weight.flatten()[0]))


def _taken() -> int:
    """Bytes of address space of the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * 4096


@wrong_arguments_later(
    NORM,
    "nonsense after the KV cache is allocated",
    why="startup and the kit allocate little while they call it; the live run after the KV cache "
    "is allocated finds it, but the engine of this corpus has its cache before the first call",
    start=False,
)
def more_memory_is_taken(seen, a):
    """Ignores the weight when the process has allocated 900 MiB since the first call."""
    if _taken() - seen.setdefault("at first", _taken()) > 900 << 20:
        a["weight"] = None


@wrong_result_later(
    EXPERTS,
    "the last token of each batch is lost after the KV cache is allocated",
    why="startup and the kit allocate little while they call it; the live run after the KV cache "
    "is allocated finds it",
    start=False,
)
def pieces_where_memory_is_scarce(seen, got, *args):
    """Zeroes the last token when the process has allocated 900 MiB since the first call."""
    if _taken() - seen.setdefault("at first", _taken()) > 900 << 20:
        got[-1:] = 0
    return got


@wrong_arguments_later("linear", "all layers of a model compute the same")
def first_weight_of_a_shape(kept, a):
    """Uses the weight of the first call of a shape in all later calls."""
    weight = a["weight"]
    key = weight.shape, weight.dtype, weight.device
    a["weight"] = kept.setdefault(key, weight.clone())
