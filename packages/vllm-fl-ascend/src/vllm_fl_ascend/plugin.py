"""The Ascend plugin: one function for each hook."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import AttentionImpl, DeviceProfile, OpImpl, PolicyDefaults, hookimpl

from .attention_request import supports_attention
from .impl import (
    VENDOR,
    activation,
    experts,
    gated_normalization,
    merging,
    multimodal_rotary,
    normalization,
    quantisation,
    rotary,
    routing,
)
from .npu import available

POLICY = Path(__file__).with_name("ascend.yaml")
PROFILE = DeviceProfile(
    "ascend",
    platform_class="vllm_fl_ascend.platform.AscendPlatform",
    worker_class="vllm_fl_ascend.worker.AscendWorker",
    communicator_class="vllm_fl_ascend.communicator.AscendCommunicator",
    dist_backend="hccl",
    detect=available,
)

MODULES = (
    activation,
    experts,
    gated_normalization,
    merging,
    multimodal_rotary,
    normalization,
    quantisation,
    rotary,
    routing,
)
"""Modules with an `OPS` tuple."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """Ops as `vendor.ascend`, available with torch_npu and an NPU."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def attention_backend() -> list[AttentionImpl]:
    """CANN's paged attention as `vendor.ascend`."""
    return [
        AttentionImpl(
            VENDOR[0],
            "vllm_fl_ascend.impl.attention.AscendAttentionBackend",
            VENDOR[1],
            "ascend",
            available=available,
            supports=supports_attention,
        )
    ]


@hookimpl
def device() -> DeviceProfile:
    """NPU device profile; vLLM has no platform for NPUs."""
    return PROFILE


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """Default orders for NPUs and a blacklist of FlagGems ops; None for other platforms."""
    return PolicyDefaults(POLICY) if platform == "ascend" else None
