"""Ascend's unmodified platform, on a CPU as its device."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

from vllm_fl_ascend.platform import AscendPlatform

from .operators import EmulationError

# This device has no caches, which every vLLM process empties at shutdown.
torch.accelerator.empty_cache = lambda: None
torch.accelerator.empty_host_cache = lambda: None

ROUTING = torch.library.Library("_moe_C", "FRAGMENT")
"""Operators that routers call on devices other than CPUs. vllm-fl defines them for an empty build
of vLLM; the CPU build under this emulation lacks them but is not considered empty."""


def _without_kernel(*args: Any) -> None:
    raise EmulationError("vLLM's own routing was called, which has no kernel for NPUs")


for operator, factor in (("topk_softmax", ""), ("topk_sigmoid", "float routed_scaling_factor, ")):
    ROUTING.define(
        f"{operator}(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
        f"Tensor gating_output, bool renormalize, Tensor? bias, {factor}Tensor? is_padding) -> ()"
    )
    ROUTING.impl(operator, _without_kernel, "CPU")


class EmulatedPlatform(AscendPlatform, CpuPlatform):
    """AscendPlatform, with the CPU platform's methods instead of vLLM's Platform."""

    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    device_control_env_var = CpuPlatform.device_control_env_var

    @classmethod
    def import_kernels(cls) -> None:
        CpuPlatform.import_kernels.__func__(cls)  # the CPU worker's kernels

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        CpuPlatform.check_and_update_config.__func__(cls, vllm_config)
        AscendPlatform.check_and_update_config.__func__(cls, vllm_config)
