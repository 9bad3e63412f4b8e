"""Attention for vLLM's v1 engine, on FlagGems's `flash_attn_varlen_func`.

It is vLLM's FlashAttention backend with other kernels, cache shape and limits, and with a warm-up
before the first request. It requires vLLM, and is imported only if the plan chooses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_fl import get_logger
from vllm_fl_ops.attention import InPlanes, planes_of

from ..loading import flag_gems

MOST_ELEMENTS = 2**31 - 1
"""Maximum elements of a layer's keys, or values: FlagGems's kernel uses 32-bit indices."""

log = get_logger("flaggems")


class AttentionFLMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """vLLM's metadata builder without the parts that only FlashAttention's kernels read."""

    # One-token batches use another kernel, which packs the query heads of a group. Like in
    # FlashAttention 2, a captured graph of such a batch is valid only for such batches.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False  # FlashAttention 3's scheduler: an unused kernel per step

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Return False, because FlagGems has no attention over a shared prefix."""
        return False


class AttentionFLBackend(InPlanes, FlashAttentionBackend):  # type: ignore[misc]
    """The attention backend; it keeps a name that vLLM knows, FLASH_ATTN."""

    # No FP8: FlagGems ignores the dtype and the scales of the cache.
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[AttentionFLImpl]:
        return AttentionFLImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionFLMetadataBuilder]:
        return AttentionFLMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return (2, blocks, block_size, heads, head_size): all keys, then all values.

        The shape in vLLM interleaves keys and values. FlagGems ignores some strides: it writes a
        token with contiguous heads and reads a layer's blocks as one run of tokens. Therefore only
        contiguous keys and contiguous values give correct results.

        Raises:
            ValueError: block_size is not a multiple of 16.
        """
        if block_size % 16:
            raise ValueError(f"block_size must be a multiple of 16, got {block_size}")
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Raise NotImplementedError, because the memory layout follows the shape."""
        raise NotImplementedError

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Accept multiples of 8 up to 256."""
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Accept the model's dtype only."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Accept decoders only."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def _no(cls) -> bool:
        return False

    supports_sink = _no  # FlagGems ignores sinks
    supports_mm_prefix = _no  # FlagGems has no mask for a bidirectional prefix
    supports_non_causal = _no  # not tested
    supports_batch_invariance = _no  # the kernel's block sizes depend on the batch
    supports_per_head_quant_scales = _no  # FlagGems ignores scales


class AttentionFLImpl(FlashAttentionImpl):  # type: ignore[misc]
    """Attention of one layer.

    Raises:
        NotImplementedError: sinks, ALiBi or a quantised cache; or FlagGems cannot be imported.
    """

    can_return_lse_for_decode = False  # makes vLLM reject decode context parallelism

    _warm: ClassVar[set[tuple[Any, ...]]] = set()
    """Kinds of layers with compiled kernels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.sinks is not None or self.alibi_slopes is not None:
            raise NotImplementedError(
                _instead("FlagGems's attention does not support sinks or ALiBi")
            )
        if self.kv_cache_dtype not in AttentionFLBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                _instead(
                    f"FlagGems's attention does not support KV cache dtype {self.kv_cache_dtype}"
                )
            )
        gems = flag_gems()
        self._attend = gems.flash_attn_varlen_func
        self._store = gems.reshape_and_cache_flash
        config = get_current_vllm_config_or_none()
        self._limits = _limits(config) if config is not None and config.model_config else None
        self._cache: torch.Tensor | None = None
        self._keys_and_values: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

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
        """Attend to the cache, which already has this step's keys and values.

        Args:
            layer: ignored.
            query: (tokens, heads, head_size), float16 or bfloat16.
            key, value: ignored.
            kv_cache: as from `get_kv_cache_shape`, or (blocks, 2, block_size, kv_heads * head_size)
                with contiguous keys and contiguous values.
            attn_metadata: None while vLLM measures memory.
            output: (tokens, heads, head_size), overwritten and returned.
            output_scale, output_block_scale: None.

        Raises:
            NotImplementedError: a quantised output, or attention that is not causal.
            RuntimeError: the KV cache is too large or has another shape.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("FlagGems's attention does not support quantised output")
        if attn_metadata is None:
            return output.fill_(0)
        if attn_metadata.causal is not True:
            raise NotImplementedError("FlagGems's attention supports only causal batches")
        keys, values = self._planes(kv_cache)
        tokens = attn_metadata.num_actual_tokens
        window = getattr(attn_metadata, "sliding_window", None) or self.sliding_window
        if self._limits is not None and not _is_capturing(query):
            self._warm_up(query, output, keys, values, attn_metadata.block_table, window)
        self._attend(
            query[:tokens],
            keys,
            values,
            max_seqlen_q=attn_metadata.max_query_len,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_k=attn_metadata.max_seq_len,
            seqused_k=attn_metadata.seq_lens,
            softmax_scale=self.scale,
            causal=True,
            window_size=window,
            softcap=self.logits_soft_cap,
            block_table=attn_metadata.block_table,
            out=output[:tokens],
        )
        return output

    def _warm_up(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        window: tuple[int, int],
    ) -> None:
        """Compile each kernel that a batch of this engine may need, once per kind of layer.

        FlagGems compiles another kernel for decoding batches, for each tile size, and for sequences
        longer than the window. Engine startup runs few of these kernels. The arguments have the
        strides of this call, because the kernel derives constants from them.
        """
        assert self._limits is not None
        tokens, requests, length = self._limits
        length = min(length, table.shape[1] * keys.shape[1])
        self._limits = None
        form = query.stride(), output.stride(), table.stride(), keys.stride(), keys.shape[1:]
        kind = query.dtype, query.device, self.num_heads, self.scale, self.logits_soft_cap, window
        if (*form, *kind) in self._warm:
            return
        self._warm.add((*form, *kind))
        began = time.monotonic()
        # Sequences within the window use the kernel without a window.
        longest = [length] if window[0] < 0 else sorted({1, length})
        made: dict[str, Any] = {"dtype": query.dtype, "device": query.device}
        counts: dict[str, Any] = {"dtype": torch.int32, "device": query.device}
        for (sequences, each), most in product(_batches(tokens, requests, length), longest):
            shape = (sequences * each, self.num_heads, self.head_size)
            try:
                pages = torch.empty_strided((sequences, table.shape[1]), table.stride(), **counts)
                self._attend(
                    torch.empty_strided(shape, query.stride(), **made).zero_(),
                    keys,
                    values,
                    max_seqlen_q=each,
                    cu_seqlens_q=torch.arange(0, shape[0] + 1, each, **counts),
                    max_seqlen_k=most,
                    seqused_k=torch.full((sequences,), each, **counts),
                    softmax_scale=self.scale,
                    causal=True,
                    window_size=window,
                    softcap=self.logits_soft_cap,
                    block_table=pages.zero_(),
                    out=torch.empty_strided(shape, output.stride(), **made),
                )
            except torch.OutOfMemoryError:  # vLLM left too little memory next to its cache
                break
        log.debug("FlagGems's attention: warmed up in %.1f s", time.monotonic() - began)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values into the cache; slots below 0 are skipped.

        Raises:
            RuntimeError: the KV cache is too large or has another shape.
        """
        keys, values = self._planes(kv_cache)
        # The kernel assumes that a token's heads are contiguous, as projections write them.
        if key.stride(1) != self.head_size or value.stride(1) != self.head_size:
            key, value = key.contiguous(), value.contiguous()
        scales = (layer._k_scale, layer._v_scale)  # required, but ignored by the kernel
        self._store(key, value, keys, values, slot_mapping, self.kv_cache_dtype, *scales)

    def _planes(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of the cache."""
        if kv_cache is self._cache:
            return self._keys_and_values
        planes = planes_of(kv_cache, self.num_kv_heads, self.head_size)
        if planes is None:
            raise RuntimeError(
                _instead(
                    "FlagGems's attention needs all keys and all values in one piece each, but "
                    f"vLLM allocated a KV cache of shape {tuple(kv_cache.shape)} and strides "
                    f"{kv_cache.stride()}, as for models that mix kinds of attention"
                )
            )
        keys, values = planes
        if keys.numel() > MOST_ELEMENTS:
            blocks = MOST_ELEMENTS // keys[0].numel()
            raise RuntimeError(
                f"FlagGems's attention can address {blocks} blocks of this model's KV cache, but "
                f"vLLM allocated {len(keys)}. Start with --num-gpu-blocks-override {blocks}, or "
                "with a lower --gpu-memory-utilization"
            )
        self._cache, self._keys_and_values = kv_cache, (keys, values)
        return keys, values


def _limits(config: Any) -> tuple[int, int, int]:
    """Return maximum tokens of a batch, maximum sequences, maximum tokens of a sequence."""
    scheduler = config.scheduler_config
    most = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    return (*most, config.model_config.max_model_len)


def _is_capturing(query: torch.Tensor) -> bool:
    """Return whether a CUDA graph is being captured, during which nothing may be compiled."""
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def _batches(tokens: int, requests: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (sequences, tokens of each) of batches for all tile sizes of FlagGems.

    The size depends on tokens per sequence and per multiprocessor, and changes at powers of two.
    Batches with one token per sequence have a separate kernel.
    """
    for sequences in _doubled(1, requests):
        yield sequences, 1
    for total in _doubled(2, tokens):
        sequences = -(-total // length)
        if sequences <= requests and total // sequences > 1:
            yield sequences, total // sequences


def _doubled(first: int, last: int) -> Iterator[int]:
    """Yield `first`, doubled while below `last`, then `last`."""
    while first < last:
        yield first
        first *= 2
    yield last


def _instead(problem: str) -> str:
    return f"{problem}. Set VLLM_FL_PER_OP='attention_backend=stock'"
