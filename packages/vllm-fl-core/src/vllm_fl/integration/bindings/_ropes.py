"""What the bindings of the rotary embeddings share: a layer's cache as two tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["halves"]


def halves() -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A function: a layer's cache -> its views (cos, sin), the same ones at every step."""
    from torch.compiler import is_compiling

    known: Tensor | None = None
    views: tuple[Tensor, ...] = ()

    def of(cache: Tensor) -> tuple[Tensor, ...]:
        nonlocal known, views
        if is_compiling():  # there views cost nothing
            return cache.chunk(2, dim=-1)
        if known is not cache:
            known, views = cache, cache.chunk(2, dim=-1)
        return views

    return of
