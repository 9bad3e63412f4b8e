"""Ascend's unmodified platform, on a CPU as its device."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

from vllm_fl_ascend.platform import AscendPlatform

from .operators import EmulationError

# Every vLLM process empties the accelerator's caches at shutdown; this device has none.
torch.accelerator.empty_cache = lambda: None
torch.accelerator.empty_host_cache = lambda: None

ROUTING = torch.library.Library("_moe_C", "FRAGMENT")
"""Operators that routers call on devices other than CPUs. vllm-fl defines them for an empty build
of vLLM; the CPU build under this emulation lacks them but counts as compiled."""


def _without_kernel(*args: Any) -> None:
    raise EmulationError("vLLM's own routing was called, which has no kernel for NPUs")


for operator, factor in (("topk_softmax", ""), ("topk_sigmoid", "float routed_scaling_factor, ")):
    ROUTING.define(
        f"{operator}(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
        f"Tensor gating_output, bool renormalize, Tensor? bias, {factor}Tensor? is_padding) -> ()"
    )
    ROUTING.impl(operator, _without_kernel, "CPU")


class EmulatedPlatform(AscendPlatform, CpuPlatform):
    """AscendPlatform; methods that it inherits from vLLM's Platform come from the CPU's
    platform."""

    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    device_control_env_var = CpuPlatform.device_control_env_var

    @classmethod
    def import_kernels(cls) -> None:
        CpuPlatform.import_kernels.__func__(cls)  # those of the CPU worker

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        CpuPlatform.check_and_update_config.__func__(cls, vllm_config)
        AscendPlatform.check_and_update_config.__func__(cls, vllm_config)
