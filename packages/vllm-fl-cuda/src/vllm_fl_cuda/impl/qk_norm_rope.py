"""Norms of query and key heads with rotary embedding, on vLLM's CUDA kernel.

vLLM's pass also finds heads whose weights are float32, as GemmaRMSNorm's are. The kernel raises
there; refused here, such a call goes to the next candidate.
"""

from __future__ import annotations

from functools import cache

import torch

from vllm_fl import Availability, OpImpl

from . import DTYPES, VENDOR, kernel, packed, provides, unsuitable

__all__ = ["OPS", "qk_norm_rope", "supports_qk_norm_rope"]

HEAD_SIZES = (64, 128, 256)

LANES = 32
"""Threads that share a head: each holds head_size / 32 features, one behind the other."""

HOPPER = (9, 0)
"""The compute capability for which the kernel takes several heads a warp."""

MOST_ELEMENTS = 2**31 - 1
"""The kernel counts the elements of qkv in 32 bits."""


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

    The kernel works in place: qkv may be overwritten.

    Args:
        qkv: (tokens, (heads + kv_heads + n) * head_size), float16 or bfloat16, of any layout.
        q_weight, k_weight: (head_size,), of qkv's dtype; head_size 64, 128 or 256.
        cos_sin_cache: (max_position, 2 * half), contiguous, float32, float16 or bfloat16.
        position_ids: (tokens,), int64 or int32. A position outside the table is not looked for.
        heads, kv_heads: how many query and key heads there are.
        epsilon: added to the mean of squares.
        rotary_interleaved: pairs are (2 * i, 2 * i + 1) instead of (i, i + half).

    Returns:
        A tensor of qkv's shape and dtype.

    Raises:
        RuntimeError: the kernel refuses a dtype or a layout.
    """
    qkv = packed(qkv)
    if len(qkv):  # a grid of no programs is an error
        head_size = q_weight.shape[0]
        if position_ids.dtype is not torch.int64 or not position_ids.is_contiguous():
            position_ids = position_ids.long().contiguous()
        values = qkv.shape[1] // head_size - heads - kv_heads
        kernel("fused_qk_norm_rope")(
            qkv,
            heads,
            kv_heads,
            values,
            head_size,
            epsilon,
            q_weight,
            k_weight,
            cos_sin_cache,
            not rotary_interleaved,
            position_ids,
        )
    return qkv


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
    """True, or why the kernel would fail, or leave something else than the op's result."""
    reason = unsuitable("qkv", qkv)
    if reason:
        return reason
    if qkv.dtype is torch.float32:
        return "the kernel takes half precision, and qkv is float32"
    size = q_weight.shape[0]
    if size not in HEAD_SIZES:
        return f"the kernel takes heads of {HEAD_SIZES} features, not of {size}"
    if heads < 1 or kv_heads < 1 or epsilon < 0:
        return f"heads are {heads} and {kv_heads}, epsilon is {epsilon}"
    if qkv.ndim != 2 or qkv.shape[1] % size or qkv.shape[1] < (heads + kv_heads) * size:
        return f"qkv is {(*qkv.shape,)}, and its heads are {heads} and {kv_heads} of {size}"
    if qkv.numel() > MOST_ELEMENTS:
        return f"qkv has {qkv.numel()} elements, of which the kernel counts {MOST_ELEMENTS}"
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        fits = weight.dtype is qkv.dtype and weight.shape == (size,)
        if not fits or not weight.is_contiguous():
            return f"{name} is {weight.dtype} {(*weight.shape,)} of strides {weight.stride()}"
    if position_ids.shape != qkv.shape[:1] or position_ids.is_floating_point():
        return f"position_ids is {position_ids.dtype} {(*position_ids.shape,)}"
    return (
        _table_suits(cos_sin_cache, size, rotary_interleaved)
        or _turns_part_wrongly(qkv, cos_sin_cache.shape[1], size, rotary_interleaved)
        or _has_code_for(qkv, cos_sin_cache)
    )


def _table_suits(table: torch.Tensor, size: int, rotary_interleaved: bool) -> str | None:
    """Why the kernel would turn with another table's numbers; None if it would not.

    A thread's features rotate all or none. Unless interleaved, it finds the partners of its own in
    the thread whose number differs in one bit: those between two halves must be a power of two.
    """
    if table.ndim != 2 or not table.is_contiguous() or table.dtype not in DTYPES:
        return f"cos_sin_cache is {table.dtype} {(*table.shape,)} of strides {table.stride()}"
    each, rotary = size // LANES, table.shape[1]
    apart = rotary // 2 // each
    whole = rotary % (each if rotary_interleaved else 2 * each) == 0
    if rotary > size or not whole or not (rotary_interleaved or apart.bit_count() == 1):
        return f"the kernel cannot turn {rotary} of {size} features"
    return None


def _turns_part_wrongly(
    qkv: torch.Tensor, rotary: int, size: int, rotary_interleaved: bool
) -> str | None:
    """Why the kernel would turn some heads wrongly; None if it would not.

    Where a head's features do not all rotate, some threads take no part in the exchange between
    its halves (vllm#51049). On Hopper a warp takes several heads in turn, from 10 240 query and
    key heads in a batch on: all but its first are wrong then. On other GPUs each has one.
    """
    if rotary == size or rotary_interleaved or _capability(qkv.device) != HOPPER:
        return None
    return (
        f"on compute capability 9.0 the kernel is wrong in large batches where {rotary} of {size} "
        "features rotate (vllm#51049)"
    )


def _has_code_for(qkv: torch.Tensor, table: torch.Tensor) -> Availability:
    """Compiled for a GPU before Ampere, the kernel returns at once where it meets bfloat16."""
    if torch.bfloat16 in (qkv.dtype, table.dtype) and _capability(qkv.device) < (8, 0):
        return "the kernel has no bfloat16 on GPUs before compute capability 8.0"
    return True


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


OPS = (
    OpImpl(
        "qk_norm_rope",
        *VENDOR,
        qk_norm_rope,
        "cuda",
        available=provides("fused_qk_norm_rope"),
        supports=supports_qk_norm_rope,
        consumes=frozenset({"qkv"}),
    ),
)
