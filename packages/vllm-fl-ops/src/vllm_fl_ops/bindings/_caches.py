"""What the bindings of paged caches share: which calls are of an unquantised cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["holds_as_is"]

AS_IS = frozenset({"auto", "float16", "half", "bfloat16", "float", "float32"})
"""Values of kv_cache_dtype with which nothing is scaled. All others are quantised."""


def holds_as_is(kv_cache_dtype: str, cache: Tensor, rows: Tensor) -> bool:
    """Whether a cache takes the rows as they are, without a scale or a cast."""
    return kv_cache_dtype in AS_IS and cache.dtype == rows.dtype
