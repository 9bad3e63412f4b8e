"""The paged cache of latent attention, on vLLM's C++ CPU kernel."""

from __future__ import annotations

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, kernel, provides, unsuitable

__all__ = ["OPS", "concat_and_cache_mla", "supports_concat_and_cache_mla"]

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Write each token's kv_c, then k_pe, into its slot, in place.

    Args:
        kv_c: (tokens, kv_lora_rank), float32, float16 or bfloat16, of any layout.
        k_pe: (tokens, rope_size), of kv_c's dtype and any layout.
        kv_cache: (blocks, block_size, kv_lora_rank + rope_size), of kv_c's dtype, its slots evenly
            spaced. It is overwritten.
        slot_mapping: (tokens,), int64; negative ones are skipped. A slot beyond the cache is not
            looked for.

    Returns:
        kv_cache, the argument itself.
    """
    rows = (x if x.stride(1) == 1 else x.contiguous() for x in (kv_c, k_pe))
    # The kernel moves 16 bits at a time; float32 is two of them.
    halves = [x.view(torch.bfloat16) for x in (*rows, kv_cache)]
    kernel("concat_and_cache_mla_cpu")(*halves, slot_mapping.contiguous())
    return kv_cache


def supports_concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> Availability:
    """True, or why the kernel would fail, or write where no slot is."""
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe), ("kv_cache", kv_cache)):
        reason = unsuitable(name, x)
        if reason:
            return reason
        if x.dtype != kv_c.dtype or x.dtype not in DTYPES:
            return f"{name} is {x.dtype} and kv_c {kv_c.dtype}"
    if kv_c.ndim != 2 or k_pe.ndim != 2 or k_pe.shape[0] != kv_c.shape[0]:
        return f"kv_c is {tuple(kv_c.shape)} and k_pe {tuple(k_pe.shape)}"
    block, row, inner = kv_cache.stride()  # the kernel sees to the width of rows itself
    if inner != 1 or block != kv_cache.shape[1] * row:
        return f"kv_cache has the strides {kv_cache.stride()}: the kernel knows that of rows alone"
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != kv_c.shape[:1]:
        return f"slot_mapping is {slot_mapping.dtype} {tuple(slot_mapping.shape)}"
    return True


OPS = (
    OpImpl(
        "concat_and_cache_mla",
        *VENDOR,
        concat_and_cache_mla,
        "cpu",
        available=provides("concat_and_cache_mla_cpu"),
        supports=supports_concat_and_cache_mla,
        consumes=frozenset({"kv_cache"}),
    ),
)
