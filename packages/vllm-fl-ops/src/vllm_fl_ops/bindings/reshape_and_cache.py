"""Where vLLM runs `reshape_and_cache`: the attention backends write their caches with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, OperatorPlace, Route, put
from vllm_fl.contracts.sizes import HEAD_SIZE, KV_HEADS

from ._caches import BLOCK_SIZE, holds_as_is, no_scale
from ._models import has_paged_attention

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]

PARAMETERS = (
    "key",
    "value",
    "key_cache",
    "value_cache",
    "slot_mapping",
    "kv_cache_dtype",
    "k_scale",
    "v_scale",
)


def _into(op: Bound) -> Bound:
    """The operator, over the op. What the op has written into the caches is not copied."""

    def kernel(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        v_scale: Tensor,
    ) -> Any:
        # The Triton function knows a layout of five dimensions, too.
        if key_cache.ndim != 4 or not holds_as_is(kv_cache_dtype, key_cache, key):
            return NotImplemented
        tokens = slot_mapping.shape[0]
        if key.shape[0] != tokens:  # padded, as vLLM's CUDA graphs need it; the slots are not
            key, value = key[:tokens], value[:tokens]
        put((key_cache, value_cache), op(key, value, key_cache, value_cache, slot_mapping))
        return None

    return kernel


NATIVE = Route(
    out=("key_cache", "value_cache"),
    own_args={"kv_cache_dtype": lambda: "auto", "k_scale": no_scale, "v_scale": no_scale},
)

_BACKENDS = "vllm.v1.attention.backends"
_TRITON = "triton_reshape_and_cache_flash"

BINDING = Binding(
    places=(
        # FlashAttention, FlashInfer, FlexAttention and others, in CUDA and ROCm builds.
        OperatorPlace(
            "_C_cache_ops::reshape_and_cache_flash",
            PARAMETERS,
            _into,
            NATIVE,
            grants=("key_cache", "value_cache"),
            tokens="slot_mapping",  # keys may be padded
        ),
        FunctionPlace(
            (
                f"vllm.v1.attention.ops.{_TRITON}.{_TRITON}",
                f"{_BACKENDS}.triton_attn.{_TRITON}",
                f"{_BACKENDS}.rocm_attn.{_TRITON}",
                f"{_BACKENDS}.rocm_segmented_attn.{_TRITON}",
            ),
            PARAMETERS,
            _into,
            NATIVE,
            grants=("key_cache", "value_cache"),
            tokens="slot_mapping",  # keys may be padded
        ),
    ),
    sizes=(KV_HEADS, HEAD_SIZE, BLOCK_SIZE),
    not_reached=(
        "quantised caches (kv_cache_dtype fp8, int8, nvfp4): vLLM's own kernel takes these calls",
        "attention on CPUs: `cpu_attn_reshape_and_cache` has a layout of its own, which is another "
        "op",
        "attention backends of plugins, which write their caches themselves",
        "heads of values that are not as wide as those of keys (`..._diffkv`), and caches with a "
        "scale for each token and head",
        "caches that are written together with a rope or a norm in one kernel: vLLM's fusion "
        "passes, and models with kernels of their own",
    ),
    when=has_paged_attention,
    between_graphs=True,
)
