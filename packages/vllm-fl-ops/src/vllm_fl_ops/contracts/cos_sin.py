"""Cosine and sine tables that are the two halves of one cache, for kernels of any rotary op."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vllm_fl import Availability


def joint_cos_sin(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """Return the cache with `cos` as left half and `sin` as right half, without a copy.

    Kernels with a single table need it. Do not call it in traced code, because it compares
    addresses.

    Args:
        cos, sin: (max_position, half) tables.

    Returns:
        Contiguous (max_position, 2 * half), or None if the two are not adjacent halves of its rows.
    """
    key = id(cos), id(sin)
    known = _joint.get(key)
    if known is not None and known[0]() is cos and known[1]() is sin:
        return known[2]
    cache = _as_one(cos, sin)
    if cache is not None:

        def forget(_: object) -> None:
            _joint.pop(key, None)

        _joint[key] = (weakref.ref(cos, forget), weakref.ref(sin, forget), cache)
    return cache


def adjacent(cos: torch.Tensor, sin: torch.Tensor) -> Availability:
    """Return True, or the reason why a kernel cannot read both tables as one.

    A rule for `OpImpl`.
    """
    return joint_cos_sin(cos, sin) is not None or "cos and sin are not the two halves of one cache"


_joint: dict[
    tuple[int, int],
    tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor], torch.Tensor],
] = {}
"""The caches of live pairs, because a layer passes the same pair at every step."""


def _as_one(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    if cos.ndim != 2 or cos.shape != sin.shape or cos.dtype != sin.dtype or not cos.numel():
        return None
    rows, half = cos.shape
    width = 2 * half
    if cos.stride() != sin.stride() or cos.stride(1) != 1 or (rows > 1 and cos.stride(0) != width):
        return None
    offset = cos.storage_offset()
    if cos.device != sin.device or sin.storage_offset() != offset + half:
        return None
    if cos.untyped_storage().data_ptr() != sin.untyped_storage().data_ptr():
        return None
    return cos.as_strided((rows, width), (width, 1), offset)
