"""vLLM's CPU platform under the out-of-tree enum."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

# This device has no caches, which vLLM empties at shutdown on all platforms except its own CPU.
torch.accelerator.empty_cache = lambda: None
torch.accelerator.empty_host_cache = lambda: None


class OotCpuPlatform(CpuPlatform):
    _enum = PlatformEnum.OOT
    # vLLM builds torch.device(f"{device_name}:{index}") from it.
    device_name = "cpu"
    # The Ray resource that announces such a device on a node.
    ray_device_key = "GPU"
