"""The paged cache of latent attention, on vLLM's C++ CPU kernel."""

from __future__ import annotations

import torch

from . import implementation, kernel

__all__ = ["OPS", "concat_and_cache_mla"]


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Write each token's kv_c, then k_pe, into its slot, in place.

    Args:
        kv_c: (tokens, kv_lora_rank), float32, float16 or bfloat16, any layout.
        k_pe: (tokens, rope_size), with kv_c's dtype, any layout.
        kv_cache: (blocks, block_size, kv_lora_rank + rope_size), with kv_c's dtype and evenly
            spaced slots; overwritten.
        slot_mapping: (tokens,), int64; negative slots are skipped. Not checked against the size of
            the cache.

    Returns:
        The argument kv_cache.
    """
    rows = (x if x.stride(1) == 1 else x.contiguous() for x in (kv_c, k_pe))
    # The kernel copies 16-bit elements, so pass float32 as pairs of them.
    halves = [x.view(torch.bfloat16) for x in (*rows, kv_cache)]
    kernel("concat_and_cache_mla_cpu")(*halves, slot_mapping.contiguous())
    return kv_cache


OPS = (
    implementation(
        concat_and_cache_mla,
        "concat_and_cache_mla_cpu",
        takes=(  # the kernel gets only the stride of slots
            "kv_cache.stride(2) == 1 and kv_cache.stride(0) == block_size * kv_cache.stride(1)",
        ),
        consumes=("kv_cache",),
    ),
)
