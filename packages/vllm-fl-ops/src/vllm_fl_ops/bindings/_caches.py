"""Helpers for the bindings of paged caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import SizeRule

if TYPE_CHECKING:
    from torch import Tensor

AS_IS = frozenset({"auto", "float16", "half", "bfloat16", "float", "float32"})
"""Values of kv_cache_dtype without quantisation."""


CACHE_BLOCK_SIZE = SizeRule("block_size", lambda config: int(config.cache_config.block_size), 16)
"""Tokens of a block of the cache, as chosen by the engine: 16 on most devices, 64 for latent
attention, 128 on CPUs, several hundred with states of linear attention."""


def holds_as_is(kv_cache_dtype: str, cache: Tensor, rows: Tensor) -> bool:
    """Return whether a cache stores the rows unchanged, without a scale or a cast."""
    return kv_cache_dtype in AS_IS and cache.dtype == rows.dtype


def without_padding(rows: Tensor, tokens: int) -> Tensor:
    """Return the rows that have a slot. vLLM's CUDA graphs pad rows, but not slots."""
    return rows if rows.shape[0] == tokens else rows[:tokens]


def no_scale(slot_mapping: Tensor) -> Tensor:
    """Return an uninitialised scale. Kernels require it but do not read it. Setting its value would
    cost a launch per layer.
    """
    import torch

    return torch.empty(1, dtype=torch.float32, device=slot_mapping.device)
