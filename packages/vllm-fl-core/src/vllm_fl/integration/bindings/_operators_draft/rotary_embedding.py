"""rotary_embedding as an operator, which turns the projections in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....contracts.binding import Bound, OperatorPlace, put
from ....contracts.rotary_embedding import joint_cos_sin

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OPERATORS"]


def _route(op: Bound) -> Bound:
    """(positions, flat projections, one cache) over the contract's (heads apart, cos, sin)."""
    known: Tensor | None = None
    halves: tuple[Tensor, ...] = ()

    def kernel(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool,
    ) -> None:
        nonlocal known, halves
        if not positions.numel():
            return
        cos, sin = halves if cos_sin_cache is known else cos_sin_cache.chunk(2, dim=-1)
        known, halves = cos_sin_cache, (cos, sin)
        positions = positions.flatten()
        heads = (positions.shape[0], -1, head_size)
        q = query.reshape(heads)  # a view, but for layouts that allow none
        k = None if key is None else key.reshape(heads)
        q_out, k_out = op(q, k, cos, sin, positions, not is_neox)
        k_out = None if key is None else k_out.reshape(key.shape)
        put((query, key), (q_out.reshape(query.shape), k_out))

    return kernel


def _native(replaced: Bound) -> Bound:
    def rotary_embedding(
        query: Tensor,
        key: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor,
        rotary_interleaved: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        cache = joint_cos_sin(cos, sin)
        if cache is None:
            cache = torch.cat((cos, sin), dim=-1)
        # Flat projections are what every build's kernel reads: a view, but for odd layouts.
        q, k = query.flatten(1), None if key is None else key.flatten(1)
        replaced(position_ids, q, k, query.shape[-1], cache, not rotary_interleaved)
        return q.view(query.shape), None if key is None or k is None else k.view(key.shape)

    return rotary_embedding


OPERATORS = (
    OperatorPlace(
        "_C::rotary_embedding",
        ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"),
        _route,
        _native,
        grants=("query", "key"),
    ),
)
