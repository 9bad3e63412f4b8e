"""Attention on a paged KV cache: gathers each sequence's blocks, then uses torch's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)


class BareCpuAttentionBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's name for third-party backends

    @staticmethod
    def get_impl_cls() -> type[BareCpuAttentionImpl]:
        return BareCpuAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[BareCpuMetadataBuilder]:
        return BareCpuMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


@dataclass(frozen=True)
class BareCpuMetadata(AttentionMetadata):
    """One step. `query_ends`: end of each sequence's queries among the step's tokens; `seq_lens`:
    tokens in the cache afterwards; `block_table`: (sequences, blocks) int32; `slot_mapping`:
    (tokens,) int64 cache slots of keys and values."""

    query_ends: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class BareCpuMetadataBuilder(AttentionMetadataBuilder[BareCpuMetadata]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in vLLM
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BareCpuMetadata:
        common = common_attn_metadata
        assert common.causal is True
        query_ends = common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist()
        return BareCpuMetadata(
            query_ends,
            common.seq_lens[: common.num_reqs].tolist(),
            common.block_table_tensor[: common.num_reqs],
            common.slot_mapping[: query_ends[-1]],
        )


class BareCpuAttentionImpl(AttentionImpl[BareCpuMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        if alibi_slopes or logits_soft_cap or kv_sharing_target_layer_name or any(others.values()):
            raise NotImplementedError("BareCpuAttentionBackend attends to keys and values alone")
        if attn_type != AttentionType.DECODER or kv_cache_dtype != "auto":
            raise NotImplementedError(f"BareCpuAttentionBackend: {attn_type}, {kv_cache_dtype}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: BareCpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values to the cache, and attend to its contents.

        Args:
            query: (tokens, heads, head_size); output: the same, written.
            key, value: (tokens, kv_heads, head_size).
            kv_cache: (blocks, kv_heads, tokens of a block, 2 * head_size), keys before values.
            attn_metadata: None while vLLM measures and compiles.
        """
        if attn_metadata is None:
            return output.zero_()
        tokens, size = attn_metadata.query_ends[-1], self.head_size
        block_size, slots = kv_cache.shape[2], attn_metadata.slot_mapping
        blocks, offsets = slots // block_size, slots % block_size
        kv_cache[blocks, :, offsets, :size] = key[:tokens]
        kv_cache[blocks, :, offsets, size:] = value[:tokens]
        start = 0
        for end, length, table in zip(
            attn_metadata.query_ends, attn_metadata.seq_lens, attn_metadata.block_table, strict=True
        ):
            used = -(-length // block_size)
            # (kv_heads, tokens of the sequence, 2 * head_size)
            cached = kv_cache[table[:used]].transpose(0, 1).flatten(1, 2)[:, :length]
            attended = scaled_dot_product_attention(
                query[start:end].transpose(0, 1).unsqueeze(0),
                cached[None, ..., :size],
                cached[None, ..., size:],
                attn_mask=self._mask(end - start, length),
                scale=self.scale,
                enable_gqa=True,
            )
            output[start:end] = attended[0].transpose(0, 1)
            start = end
        return output

    def _mask(self, queries: int, length: int) -> torch.Tensor:
        """(queries, length): the keys that each query sees. The queries are the last tokens."""
        keys = torch.arange(length)
        positions = keys[length - queries :, None]
        mask = keys <= positions
        if self.sliding_window is not None:
            mask &= keys > positions - self.sliding_window
        return mask
