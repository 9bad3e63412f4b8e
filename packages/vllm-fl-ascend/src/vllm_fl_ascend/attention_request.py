"""What Ascend's attention is asked for, and what of it the kernel cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_fl import AttentionRequest, Availability

__all__ = ["BLOCK_SIZE", "DTYPES", "HEAD_SIZES", "supports_attention"]

BLOCK_SIZE = 128
"""Tokens in a block of the KV cache: the kernel's smallest for prompts, and what it recommends."""

DTYPES = ("float16", "bfloat16")

HEAD_SIZES = (64, 128, 192)
"""What the kernel takes with packed sequences (input_layout TND); CANN's own error lists them."""

KV_CACHE_DTYPES = (None, "auto", *DTYPES)

HARMLESS = ("has_sliding_window", "use_non_causal")
"""Of the selector's flags, those that the kernel can serve."""


def supports_attention(request: AttentionRequest) -> Availability:
    """True, or why the request must not go to AscendAttentionBackend.

    A flag that is not known to work is refused, one that a newer vLLM adds included.
    """
    return _refused(request) or True


def _refused(request: AttentionRequest) -> str | None:
    if request.use_mla:
        return "AscendAttentionBackend is not MLA"
    if request.use_sparse:
        return "AscendAttentionBackend is not sparse"
    if request.has_sink:
        return "npu_fused_infer_attention_score has no sinks"
    dtype = str(request.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        return f"npu_fused_infer_attention_score takes float16 and bfloat16, not {dtype}"
    if request.kv_cache_dtype not in KV_CACHE_DTYPES:
        return f"AscendAttentionBackend has no {request.kv_cache_dtype} KV cache"
    if request.kv_cache_dtype in DTYPES and request.kv_cache_dtype != dtype:
        return f"the KV cache is {request.kv_cache_dtype} and the model {dtype}"
    if request.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"heads of {request.head_size}: npu_fused_infer_attention_score takes {sizes}"
    if request.block_size not in (None, BLOCK_SIZE):
        return f"blocks of {request.block_size} tokens: set --block-size {BLOCK_SIZE}"
    extras = request.extras
    kind = extras.get("attn_type", "decoder")
    if kind != "decoder":
        return f"AscendAttentionBackend is for decoders, not {kind}"
    if extras.get("is_hybrid"):
        return "AscendAttentionBackend has no cache in pieces, as beside layers that keep states"
    if extras.get("use_non_causal") and extras.get("has_sliding_window"):
        return "AscendAttentionBackend has no window that is not causal"
    for name, value in extras.items():
        if name.startswith(("use_", "has_")) and value and name not in HARMLESS:
            return f"AscendAttentionBackend has no {name}"
    return None
