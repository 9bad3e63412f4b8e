"""The platform: vLLM's CPU platform under the out-of-tree enum."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

# At shutdown vLLM empties the accelerator's caches on every platform but its own CPU's, in each of
# its processes; there are none here.
torch.accelerator.empty_cache = lambda: None
torch.accelerator.empty_host_cache = lambda: None


class OotCpuPlatform(CpuPlatform):
    _enum = PlatformEnum.OOT
    # vLLM builds torch.device(f"{device_name}:{index}") from it.
    device_name = "cpu"
    # The resource by which a node of a Ray cluster says that it has such a device.
    ray_device_key = "GPU"
