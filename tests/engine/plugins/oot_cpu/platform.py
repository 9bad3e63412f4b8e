"""The platform: vLLM's CPU platform under the out-of-tree enum."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum


class OotCpuPlatform(CpuPlatform):
    _enum = PlatformEnum.OOT
    # vLLM builds torch.device(f"{device_name}:{index}") from it.
    device_name = "cpu"

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        super().check_and_update_config(vllm_config)
        # At shutdown vLLM empties the accelerator's cache on every platform but its own CPU's.
        torch.accelerator.empty_cache = lambda: None
