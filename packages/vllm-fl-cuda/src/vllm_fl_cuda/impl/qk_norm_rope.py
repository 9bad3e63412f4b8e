"""Norms of query and key heads with rotary embedding, on vLLM's CUDA kernel.

vLLM's pass also finds heads whose weights are float32, as GemmaRMSNorm's are. The kernel raises
there; refused here, such a call goes to the next candidate.
"""

from __future__ import annotations

import torch

from vllm_fl import Availability

from . import capability, implementation, kernel, packed

__all__ = ["OPS", "qk_norm_rope"]

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


def _turns_whole_threads(head_size: int, half: int, rotary_interleaved: bool) -> Availability:
    """A thread's features rotate all or none.

    Unless interleaved, it finds the partners of its own in the thread whose number differs in one
    bit: those between two halves must be a power of two.
    """
    each = head_size // LANES
    whole = 2 * half % (each if rotary_interleaved else 2 * each) == 0
    if whole and (rotary_interleaved or (half // each).bit_count() == 1):
        return True
    return f"the kernel cannot turn {2 * half} of {head_size} features"


def _turns_part(
    qkv: torch.Tensor, head_size: int, half: int, rotary_interleaved: bool
) -> Availability:
    """Where a head's features do not all rotate, some threads take no part in the exchange between
    its halves (vllm#51049). On Hopper a warp takes several heads in turn, from 10 240 query and
    key heads in a batch on: all but its first are wrong then. On other GPUs each has one.
    """
    if 2 * half == head_size or rotary_interleaved or capability(qkv.device) != HOPPER:
        return True
    return (
        f"on compute capability 9.0 the kernel is wrong in large batches where {2 * half} of "
        f"{head_size} features rotate (vllm#51049)"
    )


def _has_code(qkv: torch.Tensor, cos_sin_cache: torch.Tensor) -> Availability:
    """Compiled for a GPU before Ampere, the kernel returns at once where it meets bfloat16."""
    has_it = torch.bfloat16 in (qkv.dtype, cos_sin_cache.dtype)
    if has_it and capability(qkv.device) < (8, 0):
        return "the kernel has no bfloat16 on GPUs before compute capability 8.0"
    return True


OPS = (
    implementation(
        qk_norm_rope,
        "fused_qk_norm_rope",
        takes=(
            "qkv.dtype != torch.float32",
            f"head_size in {HEAD_SIZES}",
            f"qkv.numel() <= {MOST_ELEMENTS}",
            "q_weight.dtype == qkv.dtype and q_weight.is_contiguous()",
            "k_weight.dtype == qkv.dtype and k_weight.is_contiguous()",
            "cos_sin_cache.is_contiguous()",
            _turns_whole_threads,
            _turns_part,
            _has_code,
        ),
        consumes=("qkv",),
    ),
)
