"""The platform: vLLM's CPU platform under the out-of-tree enum."""

from __future__ import annotations

import os
from typing import Any

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

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As on a CPU; with OOT_CPU_COMPILES=1 compiled piece by piece and by range, as on a GPU.

        vLLM's CPU platform has a model traced once, for all sizes, and no passes of vLLM's run.
        """
        compilation = vllm_config.compilation_config
        asked = compilation.mode, compilation.ir_enable_torch_wrap
        super().check_and_update_config(vllm_config)
        if os.environ.get("OOT_CPU_COMPILES") == "1" and not vllm_config.model_config.enforce_eager:
            compilation.mode, compilation.ir_enable_torch_wrap = asked
            compilation.compile_sizes = compilation.compile_sizes or []  # as XPU's, without graphs
