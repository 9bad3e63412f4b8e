"""Helpers for the bindings of rotary embeddings: a layer's cache as two tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROPE_TABLES = ("vllm.model_executor.layers.rotary_embedding:_ROPE_DICT",)
"""vLLM's dictionary of the rotary embeddings that it has built."""

_BASE = "vllm.model_executor.layers.rotary_embedding.base"
LAYER_ATTRIBUTES = tuple(
    f"{_BASE}:RotaryEmbeddingBase.{name}"
    for name in ("_match_cos_sin_cache_dtype", "head_size", "is_neox_style")
)
"""The attributes that are read from a layer."""

ROTATION = f"{_BASE}:RotaryEmbedding.forward_static"
"""vLLM's implementation in plain PyTorch."""


def cos_sin_halves() -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return a function from a layer's cache to its two halves (cos, sin), which it creates only
    once.
    """
    from torch.compiler import is_compiling

    known: Tensor | None = None
    views: tuple[Tensor, ...] = ()

    def of(cache: Tensor) -> tuple[Tensor, ...]:
        nonlocal known, views
        if is_compiling():  # views are free there
            return cache.chunk(2, dim=-1)
        if known is not cache:
            known, views = cache, cache.chunk(2, dim=-1)
        return views

    return of
