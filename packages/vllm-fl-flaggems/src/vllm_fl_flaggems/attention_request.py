"""Checks of an attention request against the limits of FlagGems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl_ops.attention import refused

from .loading import available, block_pointers_work, problem

if TYPE_CHECKING:
    from vllm_fl import AttentionRequest, Availability

BACKEND = "FlagGems's attention"
NHD = "FlagGems's attention supports only NHD"
DECODE = "the kernel for decoding steps"
DECODED_SIZE = 128
"""Features of a head that the kernel for decoding steps supports."""
LEAST_KEY_HEADS, MOST_QUERIES = 4, 8
"""Minimum key heads of a rank, and maximum query heads for each, as measured."""
PLANES = "FlagGems's attention needs keys and values in one piece each, as in LHBNC"


def supports_attention(request: AttentionRequest) -> Availability:
    """Return True, or the reason why FlagGems cannot compute the request.

    FlagGems itself checks little. Its kernels ignore sinks, and the dtype, scales and order of
    dimensions of the KV cache; they then return incorrect results.
    """
    if reason := refused(request, BACKEND, "has_sliding_window"):
        return reason
    if request.head_size > 256 or request.head_size % 8:
        return f"heads of {request.head_size}: {BACKEND} supports multiples of 8 up to 256"
    if request.block_size is not None and request.block_size % 16:
        return f"blocks of {request.block_size} tokens are not a multiple of 16"
    return _missing() or True


def supports_decode(request: AttentionRequest) -> Availability:
    """Return True, or why vLLM's FlashAttention with the kernel for decoding steps cannot run."""
    if reason := refused(request, DECODE, "has_sliding_window", "use_kv_connector", "use_dcp"):
        return reason
    if request.head_size != DECODED_SIZE:
        return f"heads of {request.head_size}: {DECODE} supports {DECODED_SIZE}"
    keys = request.extras.get("num_kv_heads")  # only of a whole model
    if keys and (keys < LEAST_KEY_HEADS or (request.num_heads or 0) > MOST_QUERIES * keys):
        return f"{request.num_heads} heads for {keys} key heads: not supported by {DECODE}"
    import vllm.envs
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    if getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False):
        return f"{DECODE} is not batch-invariant"
    if get_flash_attn_version(head_size=request.head_size) is None:
        return "vLLM's FlashAttention does not support this device"
    return True


def _missing() -> str | None:
    """Return why FlagGems cannot run in this process; import it only if the device exists."""
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
