"""Checks of an attention request against the limits of CANN's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_ops.attention import refused

if TYPE_CHECKING:
    from vllm_fl import AttentionRequest, Availability

__all__ = ["BLOCK_SIZE", "HEAD_SIZES", "supports_attention"]

BLOCK_SIZE = 128
"""Tokens in a block of the KV cache: the kernel's minimum for prompts, and the recommended size."""

HEAD_SIZES = (64, 128, 192)
"""Head sizes of the kernel for packed sequences (input_layout TND), from CANN's error message."""

BACKEND = "AscendAttentionBackend"


def supports_attention(request: AttentionRequest) -> Availability:
    """Return True, or the reason why AscendAttentionBackend cannot compute the request."""
    reason = refused(request, BACKEND, "has_sliding_window", "use_non_causal")
    if reason:
        return reason
    if request.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"heads of {request.head_size}: npu_fused_infer_attention_score supports {sizes}"
    if request.block_size not in (None, BLOCK_SIZE):
        return f"blocks of {request.block_size} tokens: set --block-size {BLOCK_SIZE}"
    if request.extras.get("use_non_causal") and request.extras.get("has_sliding_window"):
        return f"{BACKEND} does not support windows that are not causal"
    return True
