"""What this distribution brings: the plugin that the entry point `ascend` names."""

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
"""Those that bring ops, by theme."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `vendor.ascend`; they run where torch_npu and an NPU are."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def attention_backend() -> list[AttentionImpl]:
    """The paged attention of CANN as `vendor.ascend`."""
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
    """The NPU, which vLLM has no platform for."""
    return PROFILE


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The order per op for NPUs, and FlagGems's ops that fail there; nothing for others."""
    return PolicyDefaults(POLICY) if platform == "ascend" else None
