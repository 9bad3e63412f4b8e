"""Ascend's platform as it is, on a device that is a CPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

from vllm_fl_ascend.platform import AscendPlatform

# vLLM empties the accelerator's caches at shutdown, in each of its processes; there are none here.
torch.accelerator.empty_cache = lambda: None
torch.accelerator.empty_host_cache = lambda: None


class EmulatedPlatform(AscendPlatform, CpuPlatform):
    """AscendPlatform's answers; what it leaves to vLLM's Platform, the CPU's platform answers."""

    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    device_control_env_var = CpuPlatform.device_control_env_var

    @classmethod
    def import_kernels(cls) -> None:
        CpuPlatform.import_kernels.__func__(cls)  # the CPU worker's own

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        CpuPlatform.check_and_update_config.__func__(cls, vllm_config)
        AscendPlatform.check_and_update_config.__func__(cls, vllm_config)
