"""Paged caches, on vLLM's CUDA kernels."""

from __future__ import annotations

from functools import cache

import torch

from vllm_fl import Availability

from . import implementation, kernel

__all__ = [
    "OPS",
    "concat_and_cache_mla",
    "reshape_and_cache",
]

RESHAPE = "_C_cache_ops::reshape_and_cache_flash"
CONCAT = "_C_cache_ops::concat_and_cache_mla"

VECTOR = 16
"""Bytes that the kernel for keys and values moves at once. In vLLM 0.26 it checks only the address
that it reads, so an unaligned row of the cache destroys the CUDA context.
"""


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each token's key and value into its slot, in place.

    Both caches must have the same layout, with heads before or after slots. Slots beyond the caches
    are not detected.
    """
    if key.numel():  # an empty grid is a launch error
        one = _one(key.device)
        slots = slot_mapping.contiguous()
        kernel(RESHAPE)(_rows(key), _rows(value), key_cache, value_cache, slots, "auto", one, one)
    return key_cache, value_cache


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Write each token's kv_c, then k_pe, into its slot, in place.

    The cache must have contiguous rows. Slots beyond the cache are not detected.
    """
    if slot_mapping.numel():  # an empty grid is a launch error
        rows = [x if x.stride(1) == 1 else x.contiguous() for x in (kv_c, k_pe)]
        slots = slot_mapping.contiguous()
        kernel(CONCAT)(*rows, kv_cache, slots, "auto", _one(kv_c.device))
    return kv_cache


@cache
def _one(device: torch.device) -> torch.Tensor:
    """Return a scale of 1, which the kernels require and do not read without quantisation."""
    with torch.inference_mode(False):
        return torch.ones(1, dtype=torch.float32, device=device)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy if a token's heads are not contiguous and aligned."""
    step, side, inner = x.stride()
    if inner != 1 or side != x.shape[2] or (step * x.itemsize) % VECTOR:
        x = x.contiguous()
    return x.clone() if x.data_ptr() % VECTOR else x


def _in_vectors(key_cache: torch.Tensor, value_cache: torch.Tensor) -> Availability:
    for name, held in (("key_cache", key_cache), ("value_cache", value_cache)):
        sizes = (held.data_ptr(), *(n * held.itemsize for n in (*held.stride()[:3], held.shape[3])))
        if any(size % VECTOR for size in sizes):
            return f"heads of {name} do not begin at multiples of {VECTOR} bytes"
    return True


OPS = (
    implementation(
        reshape_and_cache,
        RESHAPE,
        takes=(
            "key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1",
            _in_vectors,
        ),
        consumes=("key_cache", "value_cache"),
    ),
    implementation(
        concat_and_cache_mla, CONCAT, takes=("kv_cache.stride(2) == 1",), consumes=("kv_cache",)
    ),
)
