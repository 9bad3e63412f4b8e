"""What Ascend's attention is asked for, and what of it the kernel cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_ops.attention import refused

if TYPE_CHECKING:
    from vllm_fl import AttentionRequest, Availability

__all__ = ["BLOCK_SIZE", "HEAD_SIZES", "supports_attention"]

BLOCK_SIZE = 128
"""Tokens in a block of the KV cache: the kernel's smallest for prompts, and what it recommends."""

HEAD_SIZES = (64, 128, 192)
"""What the kernel takes with packed sequences (input_layout TND); CANN's own error lists them."""

BACKEND = "AscendAttentionBackend"


def supports_attention(request: AttentionRequest) -> Availability:
    """True, or why the request must not go to AscendAttentionBackend."""
    reason = refused(request, BACKEND, "has_sliding_window", "use_non_causal")
    if reason:
        return reason
    if request.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"heads of {request.head_size}: npu_fused_infer_attention_score takes {sizes}"
    if request.block_size not in (None, BLOCK_SIZE):
        return f"blocks of {request.block_size} tokens: set --block-size {BLOCK_SIZE}"
    if request.extras.get("use_non_causal") and request.extras.get("has_sliding_window"):
        return f"{BACKEND} has no window that is not causal"
    return True
