"""Attention for vLLM's v1 engine, on `npu_fused_infer_attention_score`.

One call computes a batch that mixes prompts, chunks of prompts, prompts after a cached prefix and
decoded tokens. This step's keys are written to the cache first, and a step's queries are the last
tokens of their sequence.

It requires a CANN release with a kernel that reads packed sequences from a paged cache. Other
releases report "When layout is TND, not support Page Attention". It also requires vLLM, so it is
imported only if the plan chooses it. torch_npu is needed when a layer is built.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from vllm_fl_ops.attention import KV_CACHE_DTYPES, InPlanes, planes_of

from ..attention_request import BLOCK_SIZE, HEAD_SIZES
from .masks import sight

__all__ = [
    "AscendAttentionBackend",
    "AscendAttentionImpl",
    "AscendMetadata",
    "AscendMetadataBuilder",
]


class AscendAttentionBackend(InPlanes, AttentionBackend):  # type: ignore[misc]
    """The attention backend, under a name that vLLM knows."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    # `forward` knows the number of tokens without padding, so it writes the cache.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AscendAttentionImpl]:
        return AscendAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AscendMetadataBuilder]:
        return AscendMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        """Return 128. vLLM then uses this block size unless the user sets one."""
        return [BLOCK_SIZE]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Accept only 128, because the cache cannot be split into smaller blocks."""
        return block_size in (None, BLOCK_SIZE)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return (2, blocks, block_size, heads, head_size): all keys, then all values.

        Raises:
            ValueError: block_size is not 128.
        """
        if block_size != BLOCK_SIZE:
            raise ValueError(
                f"AscendAttentionBackend needs blocks of {BLOCK_SIZE} tokens, got {block_size}: "
                f"set --block-size {BLOCK_SIZE}"
            )
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True, because the kernel has a band mask."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True, because the kernel can run without a mask."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False, because the kernel reads the lengths from the host."""
        return False


@dataclasses.dataclass(frozen=True)
class AscendMetadata(AttentionMetadata):  # type: ignore[misc]
    """Metadata of one step for all layers of a group.

    Args:
        query_ends: end of each sequence's queries among the step's tokens.
        seq_lens: tokens of each sequence in the cache after this step.
        block_table: (sequences, blocks) int32: the blocks of each sequence, in order.
        slot_mapping: (tokens,) int32 or int64: cache slot of each token's key and value, in tokens.
        causal: whether later keys are hidden.
    """

    query_ends: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool


class AscendMetadataBuilder(AttentionMetadataBuilder[AscendMetadata]):  # type: ignore[misc]
    """Builds the metadata of a step, for all layers. The kernel needs lengths as Python lists.

    With speculative decoding only the device knows how many draft tokens were accepted, so the
    lengths are copied from the device, with one synchronisation per step.
    """

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.host_knows_lengths = vllm_config.speculative_config is None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AscendMetadata:
        """Build the metadata; NotImplementedError if sequences of one batch differ in causality."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "AscendAttentionBackend does not support batches where only some sequences "
                "are causal"
            )
        sequences = common.num_reqs
        lengths = common.seq_lens_cpu_upper_bound if self.host_knows_lengths else None
        if lengths is None:
            lengths = common.seq_lens
        query_ends = common.query_start_loc_cpu[1 : sequences + 1].tolist()
        return AscendMetadata(
            query_ends=query_ends,
            seq_lens=lengths[:sequences].tolist(),
            block_table=common.block_table_tensor[:sequences],
            # The kernel requires valid slots. Padding has -1 and gets slot 0, because no sequence
            # uses block 0.
            slot_mapping=common.slot_mapping[: query_ends[-1]].clamp_min(0),
            causal=common.causal,
        )


class AscendAttentionImpl(AttentionImpl[AscendMetadata]):  # type: ignore[misc]
    """The attention of one layer.

    Raises:
        NotImplementedError: ALiBi, a soft cap, sinks, a quantised cache, or not a decoder.
    """

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
        asked = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap or None,
            "kv_cache_dtype": None if kv_cache_dtype in KV_CACHE_DTYPES else kv_cache_dtype,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
            **others,
        }
        refused = [f"{name}={value}" for name, value in asked.items() if value is not None]
        if refused:
            raise NotImplementedError(
                f"AscendAttentionBackend does not support {', '.join(refused)}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._attend = torch.ops.npu.npu_fused_infer_attention_score
        self._store = torch.ops.npu.npu_scatter_pa_kv_cache
        self._cache: torch.Tensor | None = None
        self._keys_and_values: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: AscendMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values to the cache, and attend to the whole cache.

        Args:
            layer: ignored.
            query: (tokens, heads, head_size), float16 or bfloat16.
            key, value: (tokens, kv_heads, head_size); None, or not written, if the layer shares the
                cache of another layer.
            kv_cache: (2, blocks, 128, kv_heads, head_size), or (blocks, 2, 128, kv_heads *
                head_size) with contiguous keys and contiguous values.
            attn_metadata: None while vLLM measures memory.
            output: (tokens, heads, head_size), overwritten except for padding, and returned.
            output_scale, output_block_scale: None.

        Raises:
            NotImplementedError: a quantised output.
            RuntimeError: the KV cache has another shape.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("AscendAttentionBackend does not support quantised output")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.query_ends[-1]
        keys, values = self._planes(kv_cache)
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            self._store(
                key[:tokens].contiguous(),
                value[:tokens].contiguous(),
                keys,
                values,
                attn_metadata.slot_mapping,
                cache_mode="Norm",
            )
        attended, _ = self._attend(
            query[:tokens].contiguous(),
            keys.flatten(2),
            values.flatten(2),
            block_table=attn_metadata.block_table,
            block_size=BLOCK_SIZE,
            input_layout="TND",
            actual_seq_lengths=attn_metadata.query_ends,
            actual_seq_lengths_kv=attn_metadata.seq_lens,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            scale=self.scale,
            **sight(attn_metadata.causal, self.sliding_window, query.device),
        )
        output[:tokens].copy_(attended)
        return output

    def _planes(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys, values), each (blocks, 128, kv_heads, head_size); cached."""
        if kv_cache is self._cache:
            return self._keys_and_values
        heads, size = self.num_kv_heads, self.head_size
        planes = planes_of(kv_cache, heads, size)
        if planes is None or planes[0].shape[1] != BLOCK_SIZE:
            raise RuntimeError(
                "AscendAttentionBackend needs all keys and all values in one piece each, in "
                f"blocks of {BLOCK_SIZE} tokens with {heads} heads of {size}, but vLLM allocated "
                f"a KV cache of shape {tuple(kv_cache.shape)} and strides {kv_cache.stride()}. "
                f"Set --block-size {BLOCK_SIZE}, and unset VLLM_KV_CACHE_LAYOUT."
            )
        self._cache, (keys, values) = kv_cache, planes
        self._keys_and_values = keys, values
        return keys, values
