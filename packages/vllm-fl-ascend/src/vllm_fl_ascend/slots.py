"""KV cache slots of new tokens, computed without Triton."""

from __future__ import annotations

import torch

__all__ = ["compute_slot_mapping"]


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    slot_mapping_ptr: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the slot of each token; the parameters are named as in vLLM's Triton kernel.

    Args:
        num_tokens, max_num_tokens: tokens of this step, and number of slots to write.
        query_start_loc_ptr: (requests + 1,) int32, index of each request's first token.
        positions_ptr: (>= num_tokens,) int64, each token's position in its request.
        block_table_ptr: (requests, blocks) int32.
        slot_mapping_ptr: (>= max_num_tokens,) int64, overwritten.
        KV_CACHE_BLOCK_SIZE: tokens in a block.
        PAD_ID: value after the last token.

    Raises:
        NotImplementedError: context parallelism.

    Source: vLLM 0.32's `ComputeSlotMappingKernel` (v1/worker/block_table.py).
    """
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError("vllm-fl-ascend does not support context parallelism")
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=slot_mapping_ptr.device)
    requests = torch.searchsorted(query_start_loc_ptr[1:], tokens, right=True)
    positions = positions_ptr[:num_tokens]
    blocks = block_table_ptr[requests, positions // KV_CACHE_BLOCK_SIZE].long()
    slot_mapping_ptr[:num_tokens] = blocks * KV_CACHE_BLOCK_SIZE + positions % KV_CACHE_BLOCK_SIZE
    slot_mapping_ptr[num_tokens:max_num_tokens] = PAD_ID
