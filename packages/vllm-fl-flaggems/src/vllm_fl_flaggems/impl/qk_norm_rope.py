"""Norms of query and key heads with rotary embedding, on a Triton kernel of this package's own."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from vllm_fl import Availability, OpImpl

from ..kernels import CUDA, WARPS, Launcher, contiguous, heads_of_a_program, power_of_two
from ..loading import available, unsuitable
from . import DEFAULT

__all__ = ["OPS", "qk_norm_rope", "supports_qk_norm_rope", "traced_qk_norm_rope"]

LARGEST_HEAD = 1024
"""Features of a head that one program holds."""


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
    """Norm and turn the query and key heads of qkv in fp32, rounded once.

    The kernel works in place: a contiguous qkv is overwritten, and its values are not read.

    Args:
        qkv: (tokens, (heads + kv_heads + n) * head_size), float32, float16 or bfloat16, of any
            layout.
        q_weight, k_weight: (head_size,), contiguous, of qkv's dtype or float32.
        cos_sin_cache: (max_position, 2 * half), with contiguous rows, of any floating dtype.
        position_ids: (tokens,), int64 or int32. A position outside the table is not looked for.
        heads, kv_heads: how many query and key heads there are.
        epsilon: added to the mean of squares.
        rotary_interleaved: pairs are (2 * i, 2 * i + 1) instead of (i, i + half).

    Returns:
        A tensor of qkv's shape and dtype.
    """
    qkv = contiguous(qkv)
    shared = (q_weight, k_weight, cos_sin_cache, position_ids)
    _launcher()(*_call(qkv, *shared, heads, kv_heads, epsilon, rotary_interleaved))
    return qkv


def traced_qk_norm_rope(
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
    """`qk_norm_rope` as a compiled graph has it, which launches the kernel itself."""
    qkv = contiguous(qkv)
    shared = (q_weight, k_weight, cos_sin_cache, position_ids)
    call = _call(qkv, *shared, heads, kv_heads, epsilon, rotary_interleaved)
    grid, tensors, numbers, constants = call
    kernel = torch.library.wrap_triton(_launcher().kernel)
    kernel[grid](*tensors, *numbers, *constants, num_warps=WARPS)
    return qkv


@cache
def _launcher() -> Launcher:
    from ..triton_kernels import qk_norm_rope_kernel

    return Launcher(qk_norm_rope_kernel, WARPS)


def _call(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    position_ids: torch.Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
    rotary_interleaved: bool,
) -> tuple[tuple[int, int, int], tuple[torch.Tensor, ...], tuple[float, ...], tuple[Any, ...]]:
    """The kernel's grid, tensors, numbers and constants."""
    size, half = q_weight.shape[0], cos_sin_cache.shape[1] // 2
    group = heads_of_a_program(size, heads + kv_heads)
    steps = (qkv.stride(0), cos_sin_cache.stride(0), position_ids.stride(0))
    parts = (power_of_two(half), power_of_two(size - 2 * half))
    return (
        (qkv.shape[0], -(-(heads + kv_heads) // group), 1),
        (qkv, q_weight, k_weight, cos_sin_cache, position_ids),
        (*steps, heads, heads + kv_heads, float(epsilon)),
        (size, half, group, *parts, rotary_interleaved),
    )


def supports_qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    position_ids: torch.Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
    rotary_interleaved: bool = False,
) -> Availability:
    """True, or why the kernel would fail."""
    reason = unsuitable("qkv", qkv, own=True)
    if reason:
        return reason
    if qkv.device.type not in CUDA:
        return f"the kernel is launched through CUDA, and qkv is on {qkv.device}"
    # The kernel checks no shape: it would read and write beyond a smaller tensor.
    size, tokens = q_weight.shape[0], qkv.shape[0]
    if not 1 < size <= LARGEST_HEAD:
        return f"the kernel takes heads of 2 to {LARGEST_HEAD} features, not of {size}"
    wanted = min(heads, kv_heads) >= 1 and (heads + kv_heads) * size
    if qkv.ndim != 2 or qkv.shape[1] % size or not wanted or qkv.shape[1] < wanted:
        return f"qkv is {tuple(qkv.shape)}, and its heads are {heads} and {kv_heads} of {size}"
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        fits = weight.dtype in (qkv.dtype, torch.float32) and weight.shape == (size,)
        if not fits or not weight.is_contiguous():
            return f"{name} is {weight.dtype} {tuple(weight.shape)} of strides {weight.stride()}"
    if position_ids.is_floating_point() or position_ids.shape != (tokens,):
        return f"position_ids is {position_ids.dtype} {tuple(position_ids.shape)}"
    table = cos_sin_cache
    if table.ndim != 2 or table.stride(1) != 1 or table.shape[1] % 2 or table.shape[1] > size:
        return f"cos_sin_cache is {tuple(table.shape)} of strides {table.stride()}"
    return True if epsilon >= 0 else f"epsilon is {epsilon}"


OPS = (
    OpImpl(
        "qk_norm_rope",
        *DEFAULT,
        qk_norm_rope,
        available=available,
        supports=supports_qk_norm_rope,
        consumes=frozenset({"qkv"}),
        traced=traced_qk_norm_rope,
    ),
)
