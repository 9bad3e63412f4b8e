"""Triton kernels of vLLM's model runner in PyTorch, with equal parameters."""

from __future__ import annotations

import torch


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
    """Write the KV cache slot of each token of a step."""
    assert TOTAL_CP_WORLD_SIZE == 1  # no context parallelism on one CPU
    tokens = torch.arange(num_tokens, dtype=query_start_loc_ptr.dtype)
    requests = torch.searchsorted(query_start_loc_ptr[1:], tokens, right=True)
    positions = positions_ptr[:num_tokens]
    blocks = block_table_ptr[requests, positions // KV_CACHE_BLOCK_SIZE].long()
    slot_mapping_ptr[:num_tokens] = blocks * KV_CACHE_BLOCK_SIZE + positions % KV_CACHE_BLOCK_SIZE
    slot_mapping_ptr[num_tokens:max_num_tokens] = PAD_ID
