"""Paged caches, written with PyTorch's indexed assignment."""

from __future__ import annotations

import dataclasses

import torch

from . import implementations

__all__ = ["OPS", "concat_and_cache_mla", "reshape_and_cache"]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each token's key and value into its slot, in place; caches may have any layout."""
    _write(key_cache, key, slot_mapping)
    _write(value_cache, value, slot_mapping)
    return key_cache, value_cache


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Write each token's kv_c, then k_pe, into its slot, in place, in any layout."""
    rows = torch.cat((kv_c, k_pe), dim=-1)
    _write(kv_cache, rows, slot_mapping)
    return kv_cache


def _write(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write rows into their slots without synchronising with the device.

    A token without a slot repeats the write of the first token that has a slot. If no token has a
    slot, all write back the value of slot 0.
    """
    tokens = slot_mapping.shape[0]
    if not tokens:
        return
    has_slot = slot_mapping >= 0
    first = has_slot.int().argmax()
    source = torch.where(has_slot, torch.arange(tokens, device=cache.device), first)
    slots = slot_mapping[source].clamp(min=0)
    at = slots // cache.shape[1], slots % cache.shape[1]
    cache[at] = torch.where(has_slot.any(), rows[source], cache[at])


OPS = tuple(
    dataclasses.replace(impl, consumes=frozenset(consumed))
    for impl, consumed in zip(
        implementations(reshape_and_cache, concat_and_cache_mla),
        (("key_cache", "value_cache"), ("kv_cache",)),
        strict=True,
    )
)
