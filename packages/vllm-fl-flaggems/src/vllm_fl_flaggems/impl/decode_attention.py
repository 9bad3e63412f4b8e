"""vLLM's FlashAttention, with one kernel for decoding steps: cache write, attention, and its sum.

It requires vLLM, and is imported only if the plan chooses it.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from ..attention_request import DECODED_SIZE, LEAST_KEY_HEADS, MOST_QUERIES
from ..kernels import power_of_two

MOST_SEQUENCES = 512
"""Maximum sequences of a step with this kernel: vLLM's default for the largest captured graph."""

TILE, PROGRAMS, FAN = 64, 256, 8
"""Tokens of a tile, programs of all key heads, and parts that a program adds up: the fastest on an
H200, with 4 warps and 3 stages, for 1 to 64 sequences of 40 to 32000 tokens (2026-11-30)."""
LEVELS = 2
"""Levels of such sums, for up to FAN ** LEVELS programs of a key head."""


class DecodeMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    # A graph of steps with one token per sequence is not valid for other steps of that size.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH


class DecodeBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's backend, except that its implementation also writes the cache."""

    forward_includes_kv_cache_update: ClassVar[bool] = True

    @staticmethod
    def get_impl_cls() -> type[DecodeImpl]:
        return DecodeImpl

    @staticmethod
    def get_builder_cls() -> type[DecodeMetadataBuilder]:
        return DecodeMetadataBuilder


class DecodeImpl(FlashAttentionImpl):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decodes = (
            self.head_size == DECODED_SIZE
            and self.num_kv_heads >= LEAST_KEY_HEADS
            and self.num_queries_per_kv <= MOST_QUERIES
            and self.kv_cache_dtype in ("auto", "float16", "bfloat16")
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.alibi_slopes is None
            and self.sinks is None
            and self.attn_type == "decoder"
            and self.kv_sharing_target_layer_name is None
            and self.dcp_world_size == 1
        )
        self._arrived: torch.Tensor | None = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values, and attend to them and to the cache.

        Args:
            layer: has the scales of the cache.
            query: (tokens, heads, head_size), float16 or bfloat16.
            key, value: (tokens, key heads, head_size); None if another layer writes the cache.
            kv_cache: (blocks, key heads, block_size, 2 * head_size).
            attn_metadata: None while vLLM measures memory.
            output: (tokens, heads, head_size), overwritten and returned.
            output_scale, output_block_scale: None.
        """
        scales = output_scale, output_block_scale
        step = query, key, value, output, kv_cache, attn_metadata
        if attn_metadata is not None and key is not None:
            if scales == (None, None) and self._can_decode(*step):
                self._decode(*step)
                return output
            if self.kv_sharing_target_layer_name is None:
                slots = attn_metadata.slot_mapping
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        args = layer, query, key, value, kv_cache, attn_metadata, output, *scales
        result: torch.Tensor = super().forward(*args)
        return result

    def _can_decode(self, *given: Any) -> bool:
        *tensors, cache, metadata = given
        size = self.head_size
        return (
            self.decodes
            and metadata.max_query_len == 1
            and metadata.num_actual_tokens <= min(MOST_SEQUENCES, len(metadata.seq_lens))
            and not getattr(metadata, "use_cascade", False)
            and getattr(metadata, "rswa_prefix_lens", None) is None
            and cache.shape[1:] == (self.num_kv_heads, cache.shape[2], 2 * size)
            and cache.dtype == tensors[0].dtype
            and cache.stride(3) == 1
            and all(each.stride()[1:] == (size, 1) for each in tensors)
        )

    def _decode(
        self, query: Any, key: Any, value: Any, output: Any, cache: Any, metadata: Any
    ) -> None:
        from ..triton_kernels import decode_attention_kernel

        heads, group, size = self.num_kv_heads, self.num_queries_per_kv, self.head_size
        programs, count = max(1, PROGRAMS // heads), metadata.num_actual_tokens
        if self._arrived is None:
            self._arrived = query.new_zeros(LEVELS, heads, programs, 2, dtype=torch.int32)
        parts = query.new_empty(heads * programs * 2 * group * (size + 2), dtype=torch.float32)
        decode_attention_kernel[heads, programs](
            query,
            key,
            value,
            cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.slot_mapping,
            output,
            parts,
            self._arrived,
            self.scale / math.log(2),
            count,
            *(each.stride(0) for each in (query, key, value, output, metadata.block_table)),
            *cache.stride()[:3],
            SIZE=size,
            GROUP=group,
            ROWS=max(16, power_of_two(group)),
            BLOCK=cache.shape[2],
            COUNT=1 if count == 1 else MOST_SEQUENCES,
            TILE=TILE,
            PROGRAMS=programs,
            FAN=FAN,
            num_warps=4,
            num_stages=3,
        )
