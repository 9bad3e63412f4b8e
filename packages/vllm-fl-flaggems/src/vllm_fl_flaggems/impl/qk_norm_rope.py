"""Norms of query and key heads with rotary embedding, on this package's Triton kernel."""

from __future__ import annotations

from functools import cache

import torch

from ..kernels import WARPS, Launcher, contiguous, heads_of_a_program, power_of_two
from . import implementation

LARGEST_HEAD = 1024
"""Features of a head that fit into one program."""


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    position_ids: torch.Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
    rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Normalise and rotate the query and key heads of qkv in fp32, rounded once.

    The kernel works in place and does not read the values. Positions outside the table are not
    detected. Not supported: non-contiguous weights or rows of the table.
    """
    qkv = contiguous(qkv)
    size, half = q_weight.shape[0], cos_sin_cache.shape[1] // 2
    group = heads_of_a_program(size, heads + kv_heads)
    steps = (qkv.stride(0), cos_sin_cache.stride(0), position_ids.stride(0))
    parts = (power_of_two(half), power_of_two(size - 2 * half))
    _launcher()(
        (qkv.shape[0], -(-(heads + kv_heads) // group), 1),
        (qkv, q_weight, k_weight, cos_sin_cache, position_ids),
        (*steps, heads, heads + kv_heads, float(epsilon)),
        (size, half, group, *parts, rotary_interleaved),
    )
    return qkv


@cache
def _launcher() -> Launcher:
    from ..triton_kernels import qk_norm_rope_kernel

    return Launcher(qk_norm_rope_kernel, WARPS)


OPS = (
    implementation(
        qk_norm_rope,
        f"1 < head_size <= {LARGEST_HEAD}",
        "q_weight.is_contiguous() and k_weight.is_contiguous()",
        "cos_sin_cache.stride(1) == 1",
        own=True,
        consumes=frozenset({"qkv"}),
    ),
)
