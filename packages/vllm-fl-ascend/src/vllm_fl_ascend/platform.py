"""vLLM's platform for Ascend NPUs: what vLLM asks of hardware that it has no platform for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_fl import get_logger

from .attention_request import BLOCK_SIZE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["AscendPlatform"]

log = get_logger("engine")

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


class AscendPlatform(Platform):  # type: ignore[misc]
    """NPUs by torch_npu: eager, with HCCL between ranks, and 128 tokens in a KV-cache block."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]  # noqa: RUF012
    dist_backend = "hccl"
    # What vLLM compiles on its own, such as its sampler: Inductor has no code for NPUs.
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: vLLM's own kernels are for other hardware."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The chip's name, such as Ascend910B1."""
        return str(torch_npu.npu.get_device_name(device_id))

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """The device's memory in bytes."""
        return int(torch_npu.npu.get_device_properties(device_id).total_memory)

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """The peak of allocated memory in bytes."""
        return float(torch_npu.npu.max_memory_allocated(device))

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make `device` the current one."""
        torch_npu.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the generators of all devices."""
        torch_npu.npu.manual_seed_all(seed)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Raise ValueError for a dtype in which no model runs here."""
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"NPUs run models in bfloat16, float16 or float32, not in {dtype}")

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Raise ValueError: vLLM's kernels for quantised layers are for other hardware."""
        raise ValueError(
            f"vllm-fl-ascend has no kernels for {quant} quantization; serve the model unquantised"
        )

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Raise ValueError: this is asked only where no candidate of the plan takes the model."""
        raise ValueError(
            "No attention backend takes this model on an NPU, and vLLM has none of its own there; "
            "`vllm-fl explain attention_backend` says why each was left out"
            + (f" ({selected_backend.name} was asked for)" if selected_backend else "")
        )

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Choose vLLM's first model runner: the second one is written in Triton."""
        os.environ.setdefault(RUNNER, "0")

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Take what is not proven on NPUs out of the configuration, and say so."""
        from vllm.config import CompilationMode, CUDAGraphMode

        model, cache = vllm_config.model_config, vllm_config.cache_config
        compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
        parallel = vllm_config.parallel_config
        if vllm_config.use_v2_model_runner:
            raise ValueError(f"vllm-fl-ascend has no model runner V2: unset {RUNNER}")
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "vllm-fl-ascend has no speculative decoding: vLLM's runner copies drafts on CUDA "
                "streams"
            )
        if parallel.data_parallel_size > 1 or parallel.assigned_physical_gpu_ids is not None:
            raise ValueError(
                "vllm-fl-ascend's worker takes the NPU of its rank, so that there is no data "
                "parallelism in one engine: start one per group of NPUs, and choose these with "
                f"{cls.device_control_env_var}"
            )
        if model is not None and not model.enforce_eager:
            log.info(
                "vllm-fl-ascend runs the model eagerly, without torch.compile and graphs: neither "
                "is proven on NPUs yet (--enforce-eager is the same without this line)"
            )
            # Not only here: vLLM's later steps decide by it.
            model.enforce_eager = True
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []
        scheduler.async_scheduling = False  # its copies run on CUDA streams
        parallel.disable_custom_all_reduce = True
        if cache is not None and not cache.user_specified_block_size:
            cache.block_size = BLOCK_SIZE

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Where Triton is absent, compute with torch what vLLM's runner computes with Triton."""
        from vllm.triton_utils import HAS_TRITON

        if HAS_TRITON:
            return
        from vllm.triton_utils.dispatcher import register_kernels

        from .slots import compute_slot_mapping

        kernel = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
        register_kernels({kernel: compute_slot_mapping})
