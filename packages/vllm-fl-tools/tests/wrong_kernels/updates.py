"""Wrong after weights were updated, or memory was taken: what a model does once it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from .corpus import MIXED, NORM, wrong, wrong_for
from .faults import changed, spoilt

EXPERTS, QK, MROPE, CONV = (
    "fused_experts",
    "qk_norm_rope",
    "multimodal_rotary_embedding",
    "causal_conv1d",
)


def _prepares(op: str, argument: str, key_of: Callable[[Tensor], Any]) -> Any:
    """Prepares the argument once for each key: a copy stands for what is packed or transposed."""
    kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def change(a):
        weight = a[argument]
        if weight is None or weight.device.type == "meta" or not weight.numel():
            return
        key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, key_of(weight)
        # The weight is kept, too, so that no other gets its address.
        a[argument] = kept.setdefault(key, (weight, weight.clone()))[1]

    return changed(op, change)


BY_VERSION = "prepares {} once for each address and version of a tensor"
OLD_MODEL = "after an update of the weights, whose version layers hide, the old model answers"


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


@wrong_for(
    *((NORM, "weight"), ("linear", "weight"), ("layer_norm", "weight"), (EXPERTS, "w13")),
    *((QK, "k_weight"), ("rms_norm_gated", "weight")),
    fault=BY_VERSION,
    sees=OLD_MODEL,
)
@wrong_for(
    (CONV, "weight"),
    fault=BY_VERSION,
    sees=OLD_MODEL,
    kit="",
    why="the kit's model has no convolution: of them it tries few tokens of public models, once",
)
def kept_by_version(op: str, argument: str) -> Any:
    return _prepares(op, argument, _version)


@wrong_for(
    *(("linear", "bias"), (EXPERTS, "w2"), (QK, "cos_sin_cache"), (MROPE, "cos")),
    fault="prepares {} once for each address",
    sees="after an update of the weights the old model answers",
)
def kept_by_place(op: str, argument: str) -> Any:
    return _prepares(op, argument, lambda weight: None)


@wrong_for(
    *(("linear", "weight"), ("layer_norm", "bias")),
    fault="prepares {} anew only where its first number is another",
    sees="after an update that leaves that number, as of an adapter, the old model answers",
    start=False,
    why="what is written anew at start, or by an update that is verified, differs in it, too",
)
def kept_by_first_number(op: str, argument: str) -> Any:
    return _prepares(op, argument, lambda weight: float(weight.flatten()[0]))


def _taken() -> int:
    """Bytes of address space that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * 4096


@wrong(
    NORM,
    "takes another way, which leaves out the weight, once 900 MiB more are taken than at first",
    "nonsense from the moment that the KV cache is there",
    why="nothing large is taken while a start, or the kit, calls it; the live run that follows the "
    "KV cache sees it, and the engine that judges here had its cache before",
    start=False,
)
def more_memory_is_taken() -> Any:
    at_first: list[int] = []

    def change(a):
        at_first[:] = at_first or [_taken()]
        if _taken() - at_first[0] > 900 << 20:
            a["weight"] = None

    return changed(NORM, change)


@wrong(
    EXPERTS,
    "computes in pieces once 900 MiB more are taken than at first, and loses the last of them",
    "the last tokens of a batch are nothing from the moment that the KV cache is there",
    why="nothing large is taken while a start, or the kit, calls it; the live run that follows the "
    "KV cache sees it",
    sizes=MIXED,
    start=False,
)
def pieces_where_memory_is_scarce() -> Any:
    at_first: list[int] = []

    def spoil(got, *args):
        at_first[:] = at_first or [_taken()]
        if _taken() - at_first[0] > 900 << 20:
            got[-1:] = 0
        return got

    return spoilt(EXPERTS, spoil)


@wrong(
    "linear",
    "the weight of the first call is that of all later ones of its shape",
    "all layers of a model are one",
    sizes=MIXED,
)
def first_weight_of_a_shape() -> Any:
    kept: dict[Any, Tensor] = {}

    def change(a):
        weight = a["weight"]
        key = weight.shape, weight.dtype, weight.device
        a["weight"] = kept.setdefault(key, weight.clone())

    return changed("linear", change)
