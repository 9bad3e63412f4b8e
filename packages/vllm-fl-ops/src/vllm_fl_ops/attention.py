"""Code of paged attention backends: request checks, and a cache with all keys before all values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vllm_fl import AttentionRequest

HALVES = ("float16", "bfloat16")
KV_CACHE_DTYPES = (None, "auto", *HALVES)


def refused(request: AttentionRequest, backend: str, *harmless: str) -> str | None:
    """Return why a kernel for decoders in half precision does not support a request, or None.

    Unknown flags, such as new flags of a newer vLLM, are unsupported.

    Args:
        request: the request.
        backend: the first words of the reason.
        harmless: the flags that the kernel supports.
    """
    extras, dtype = request.extras, str(request.dtype).removeprefix("torch.")
    own = {name: getattr(request, name) for name in ("use_mla", "use_sparse", "has_sink")}
    for name, value in {**own, **extras}.items():
        if name.startswith(("use_", "has_")) and value and name not in harmless:
            return f"{backend} does not support {name}"
    if dtype not in HALVES:
        return f"{backend} does not support {dtype}"
    if request.kv_cache_dtype not in KV_CACHE_DTYPES:
        return f"{backend} does not support KV cache dtype {request.kv_cache_dtype}"
    if request.kv_cache_dtype in HALVES and request.kv_cache_dtype != dtype:
        return f"the KV cache is {request.kv_cache_dtype}, but the model is {dtype}"
    if (kind := extras.get("attn_type", "decoder")) != "decoder":
        return f"{backend} supports decoders only, not {kind}"
    if extras.get("is_hybrid"):
        return f"{backend} does not support the split cache of models with state layers"
    return None


class InPlanes:
    """Methods of vLLM's `AttentionBackend` for a cache with all keys before all values."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a spec of the same size, with a head slot for keys and a head slot for values.

        Up to vLLM 0.28 the backend shapes the cache in `get_kv_cache_shape`, and the spec is
        unchanged.

        Raises:
            ValueError: keys and values have different sizes.
        """
        from vllm.v1.attention.backend import AttentionBackend

        if hasattr(AttentionBackend, "get_kv_cache_shape"):
            return spec
        if spec.head_size != spec.head_size_v:
            raise ValueError(
                f"{cls.__name__} needs keys and values of the same size, got {spec.head_size} and "
                f"{spec.head_size_v}. Set VLLM_FL_PER_OP='attention_backend=stock'"
            )
        size = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return dataclasses.replace(spec, num_head_slots=2, state_content_bytes=size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The layout in which a layer's keys, and its values, are each contiguous."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LHBNC,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """False. Connectors move blocks, and expect a block's keys and values to be contiguous."""
        return False


def planes_of(kv_cache: torch.Tensor, heads: int, size: int) -> list[torch.Tensor] | None:
    """Return contiguous [keys, values], each (blocks, block_size, heads, size), else None.

    Args:
        kv_cache: (2, blocks, block_size, heads, size), or (blocks, 2, block_size, heads * size).
        heads, size: number and size of the key heads.
    """
    planes = kv_cache.transpose(0, 1) if kv_cache.ndim == 4 else kv_cache
    is_whole = planes.shape[0] == 2 and planes.shape[3:].numel() == heads * size
    if not is_whole or not all(plane.is_contiguous() for plane in planes):
        return None
    return [plane.view(*plane.shape[:2], heads, size) for plane in planes]
