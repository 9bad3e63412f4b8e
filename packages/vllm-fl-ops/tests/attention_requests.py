"""Attention requests for tests of backends."""

from __future__ import annotations

from typing import Any

import torch

from vllm_fl import AttentionRequest

PLAIN = AttentionRequest(
    head_size=128,
    dtype=torch.bfloat16,
    kv_cache_dtype="auto",
    block_size=128,
    num_heads=32,
    extras={"attn_type": "decoder", "has_sliding_window": True, "use_mm_prefix": False},
)

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"use_mla": True}, "use_mla"),
    ({"use_sparse": True}, "use_sparse"),
    ({"has_sink": True}, "has_sink"),
    ({"dtype": torch.float32}, "float32"),
    ({"kv_cache_dtype": "fp8"}, "fp8"),
    ({"kv_cache_dtype": "float16"}, "bfloat16"),
    ({"extras": {"attn_type": "encoder_only"}}, "encoder_only"),
    ({"extras": {"use_mm_prefix": True}}, "use_mm_prefix"),
    ({"extras": {"use_kv_connector": True}}, "use_kv_connector"),
    ({"extras": {"use_dcp": True}}, "use_dcp"),
    ({"extras": {"is_hybrid": True}}, "state layers"),
    ({"extras": {"use_what_a_later_vllm_adds": True}}, "use_what_a_later_vllm_adds"),
]
"""Unsupported by both Ascend's and FlagGems's kernels, with a part of the reason."""
