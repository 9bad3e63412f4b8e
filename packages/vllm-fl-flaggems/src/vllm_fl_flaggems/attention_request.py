"""What FlagGems's attention is asked for, and what of it comes out wrong or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .loading import available, block_pointers_work, problem

if TYPE_CHECKING:
    from vllm_fl import AttentionRequest, Availability

__all__ = ["supports_attention"]

DTYPES = ("float16", "bfloat16")
KV_CACHE_DTYPES = (None, "auto", *DTYPES)
NHD = "FlagGems's attention writes NHD"
PLANES = "FlagGems's attention needs keys and values in one piece each, as LHBNC has them"
HYBRID = "FlagGems's attention has no cache in pieces, as beside layers that keep states"
HARMLESS = ("has_sliding_window",)
"""Of the selector's flags, the one that FlagGems's kernel has."""


def supports_attention(request: AttentionRequest) -> Availability:
    """True, or why the request must not go to FlagGems.

    Its kernels check little: they ignore sinks, the type and scales of the KV cache and the order
    of its dimensions, and give wrong numbers. So a flag that is not known to work is refused, one
    that a newer vLLM adds included.
    """
    return _refused(request) or _missing() or True


def _refused(request: AttentionRequest) -> str | None:
    if request.use_mla:
        return "FlagGems's attention is not MLA"
    if request.use_sparse:
        return "FlagGems's attention is not sparse"
    if request.has_sink:
        return "FlagGems's attention ignores sinks"
    dtype = str(request.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        return f"FlagGems's attention has no kernel for {dtype}"
    if request.kv_cache_dtype not in KV_CACHE_DTYPES:
        return f"FlagGems's attention ignores the scales of a {request.kv_cache_dtype} KV cache"
    if request.kv_cache_dtype in DTYPES and request.kv_cache_dtype != dtype:
        return f"the KV cache is {request.kv_cache_dtype} and the model {dtype}"
    if request.head_size > 256 or request.head_size % 8:
        return f"heads of {request.head_size}: FlagGems's attention takes multiples of 8 up to 256"
    if request.block_size is not None and request.block_size % 16:
        return f"blocks of {request.block_size} tokens are no multiple of 16"
    kind = request.extras.get("attn_type", "decoder")
    if kind != "decoder":
        return f"FlagGems's attention is for decoders, not {kind}"
    if request.extras.get("is_hybrid"):
        return HYBRID
    for name, value in request.extras.items():
        if name.startswith(("use_", "has_")) and value and name not in HARMLESS:
            return f"FlagGems's attention has no {name}"
    return None


def _missing() -> str | None:
    """Why it cannot run in this process; FlagGems is imported where the device exists already."""
    import torch

    if not torch.cuda.is_initialized():
        verdict = available()
        return None if verdict is True else verdict
    reason = problem()
    if reason:
        return reason
    works = block_pointers_work()
    if works is not True:
        return works
    import vllm.envs
    from vllm.v1.attention.backend import AttentionBackend

    asked = getattr(vllm.envs, "VLLM_KV_CACHE_LAYOUT", None)
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        return f"VLLM_KV_CACHE_LAYOUT={asked}: {NHD}" if asked == "HND" else None
    return f"VLLM_KV_CACHE_LAYOUT={asked}: {PLANES}" if asked not in (None, "LHBNC") else None
