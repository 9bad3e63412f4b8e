"""Binding of `reshape_and_cache`: attention backends write their caches with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionTarget, OperatorTarget, Route

from ..contracts.rules import HEAD_SIZE, KV_HEADS
from ._caches import CACHE_BLOCK_SIZE, holds_as_is, no_scale, without_padding
from ._models import has_paged_attention
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor

PARAMETERS = names(
    "key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale"
)


def _holds_as_is(key: Tensor, key_cache: Tensor, kv_cache_dtype: str) -> bool:
    # The Triton function also supports a layout of five dimensions.
    return key_cache.ndim == 4 and holds_as_is(kv_cache_dtype, key_cache, key)


ROUTE = Route(
    args={
        "key": lambda key, slot_mapping: without_padding(key, slot_mapping.shape[0]),
        "value": lambda value, slot_mapping: without_padding(value, slot_mapping.shape[0]),
    },
    only=_holds_as_is,
    out=("key_cache", "value_cache"),
    own_args={"kv_cache_dtype": lambda: "auto", "k_scale": no_scale, "v_scale": no_scale},
)

_BACKENDS = "vllm.v1.attention.backends"
_TRITON = "triton_reshape_and_cache_flash"

BINDING = Binding(
    targets=(
        # FlashAttention, FlashInfer, FlexAttention and others, in CUDA and ROCm builds.
        OperatorTarget(
            "_C_cache_ops::reshape_and_cache_flash",
            PARAMETERS,
            ROUTE,
            tokens="slot_mapping",  # keys may be padded
        ),
        FunctionTarget(
            (
                f"vllm.v1.attention.ops.{_TRITON}.{_TRITON}",
                f"{_BACKENDS}.triton_attn.{_TRITON}",
                f"{_BACKENDS}.rocm_attn.{_TRITON}",
                f"{_BACKENDS}.rocm_segmented_attn.{_TRITON}",
            ),
            PARAMETERS,
            ROUTE,
            tokens="slot_mapping",  # keys may be padded
        ),
    ),
    sizes=(KV_HEADS, HEAD_SIZE, CACHE_BLOCK_SIZE),
    not_reached=(
        "quantised caches (kv_cache_dtype fp8, int8, nvfp4): vLLM's kernel runs these calls",
        "attention on CPUs: `cpu_attn_reshape_and_cache` has another layout, and is another op",
        "attention backends of plugins, which write their caches themselves",
        "value heads with another size than key heads (`..._diffkv`), and caches with a scale for "
        "each token and head",
        "caches written by the kernel of a rope or norm: vLLM's fusion passes, and models with "
        "their own kernels",
    ),
    when=has_paged_attention,
    between_graphs=True,
)
