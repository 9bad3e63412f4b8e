"""Paged caches, on FlagGems's Triton kernels.

FlagGems writes only into caches with slots before heads and contiguous heads. Since vLLM 0.26 keys
and values are interleaved, so this package's kernel is used if it can be launched.
"""

from __future__ import annotations

from functools import cache

import torch

from vllm_fl import Availability, OpImpl

from ..kernels import CUDA, WARPS, Launcher, contiguous, heads_of_a_program, power_of_two
from ..loading import available, flag_gems
from . import FLAGOS, device_condition, implementation

LONGEST_PIECE = 512
"""Elements of a latent that FlagGems copies at once, or all elements of a shorter latent. Ranges in
Triton must be powers of two."""


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each token's key and value into its slot, in place.

    Slots beyond the caches are not detected. Not supported: non-contiguous heads in the caches.
    """
    if key.numel():  # not every device's driver may run an empty grid
        slots = slot_mapping.contiguous()
        if key.device.type in CUDA:
            _scatter(key, value, key_cache, value_cache, slots)
        else:
            store, one = flag_gems().reshape_and_cache_flash, _one(key.device)
            store(_rows(key), _rows(value), key_cache, value_cache, slots, "auto", one, one)
    return key_cache, value_cache


def _in_rows(key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Return whether FlagGems can write into the caches; it reads only the first block stride."""
    *_, heads, size = key_cache.shape
    steps = (key_cache.stride(0), heads * size, size, 1)
    return key_cache.stride() == steps == value_cache.stride()


def _scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write into caches of any layout with this package's kernel."""
    key, value = (x if x.stride(2) == 1 else contiguous(x) for x in (key, value))
    tokens, heads, size = key.shape
    group = heads_of_a_program(size, heads)
    steps = (
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
    )
    _scattering()(
        (tokens, -(-heads // group), 1),
        (key, value, key_cache, value_cache, slots),
        (*steps, key_cache.shape[1], heads),
        (size, group, power_of_two(size)),
    )


@cache
def _scattering() -> Launcher:
    from ..triton_kernels import reshape_and_cache_kernel

    return Launcher(reshape_and_cache_kernel, WARPS)


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Write each token's kv_c, then k_pe, into its slot, in place.

    Slots beyond the cache are not detected. Not supported: non-contiguous rows in the cache.
    """
    store = flag_gems().concat_and_cache_mla
    if slot_mapping.numel():  # not every device's driver may run an empty grid
        rows = (x if x.stride(1) == 1 else x.contiguous() for x in (kv_c, k_pe))
        store(*rows, kv_cache, slot_mapping.contiguous(), "auto", _one(kv_c.device))
    return kv_cache


@cache
def _one(device: torch.device) -> torch.Tensor:
    """Return a scale of 1, which FlagGems requires and does not read without quantisation."""
    with torch.inference_mode(False):
        return torch.ones(1, dtype=torch.float32, device=device)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy if a token's heads are not contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else contiguous(x)


def _finds_slots(
    key: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> Availability:
    if key.device.type in CUDA:
        return True
    if (reason := device_condition("key")(key=key)) is not True:
        return reason
    steps = key_cache.stride()
    in_rows = _in_rows(key_cache, value_cache)
    return in_rows or f"key_cache has strides {steps}, but FlagGems writes slots before heads"


OPS = (
    OpImpl(
        "reshape_and_cache",
        *FLAGOS,
        reshape_and_cache,
        available=available,
        takes=("key_cache.stride(3) == 1 and value_cache.stride(3) == 1", _finds_slots),
        consumes=frozenset({"key_cache", "value_cache"}),
    ),
    implementation(
        concat_and_cache_mla,
        "kv_cache.stride(2) == 1",
        f"min(kv_lora_rank, {LONGEST_PIECE}).bit_count() == 1",
        consumes=frozenset({"kv_cache"}),
    ),
)
