"""Norms of query and key heads with rotary embedding, on vLLM's CUDA kernel.

The pass in vLLM also matches heads with float32 weights, such as in GemmaRMSNorm, but the kernel
raises for them. Here such calls are unsupported, and the next implementation computes them.
"""

from __future__ import annotations

import torch

from vllm_fl import Availability

from . import capability, implementation, kernel, packed

__all__ = ["OPS", "qk_norm_rope"]

KERNEL_HEAD_SIZES = (64, 128, 256)

LANES = 32
"""Threads that share a head; each has head_size / 32 consecutive features."""

HOPPER = (9, 0)
"""Compute capability with several heads per warp of the kernel."""

MOST_ELEMENTS = 2**31 - 1
"""The kernel indexes qkv with 32-bit integers."""


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

    The kernel works in place. Positions outside the table are not detected. RuntimeError if the
    kernel rejects a dtype or a layout.
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
    """Require that either all or none of a thread's features rotate.

    Unless pairs are interleaved, a thread exchanges features with another thread, and their numbers
    differ in one bit. So the number of threads per half must be a power of two.
    """
    each = head_size // LANES
    whole = 2 * half % (each if rotary_interleaved else 2 * each) == 0
    if whole and (rotary_interleaved or (half // each).bit_count() == 1):
        return True
    return f"the kernel cannot rotate {2 * half} of {head_size} features"


def _turns_part(
    qkv: torch.Tensor, head_size: int, half: int, rotary_interleaved: bool
) -> Availability:
    """Reject partial rotation on Hopper: large batches have incorrect results (vllm#51049).

    If only a part of a head rotates, some threads do not take part in the exchange between halves.
    From 10 240 query and key heads in a batch on, a warp on Hopper computes several heads, and all
    but the first are incorrect. On other GPUs a warp has one head.
    """
    if 2 * half == head_size or rotary_interleaved or capability(qkv.device) != HOPPER:
        return True
    return (
        f"on compute capability 9.0 the kernel is incorrect in large batches if {2 * half} of "
        f"{head_size} features rotate (vllm#51049)"
    )


def _has_code(qkv: torch.Tensor, cos_sin_cache: torch.Tensor) -> Availability:
    """Reject bfloat16 before Ampere, because the kernel would return without a result."""
    has_it = torch.bfloat16 in (qkv.dtype, cos_sin_cache.dtype)
    if has_it and capability(qkv.device) < (8, 0):
        return "the kernel supports bfloat16 from compute capability 8.0 on"
    return True


OPS = (
    implementation(
        qk_norm_rope,
        "fused_qk_norm_rope",
        takes=(
            "qkv.dtype != torch.float32",
            f"head_size in {KERNEL_HEAD_SIZES}",
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
