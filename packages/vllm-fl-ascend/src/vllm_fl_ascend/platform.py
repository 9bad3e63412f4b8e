"""Platform for Ascend NPUs, which vLLM does not have."""

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
    """NPUs with torch_npu: eager mode, HCCL between ranks, 128 tokens per KV cache block."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]  # noqa: RUF012
    dist_backend = "hccl"
    # For code that vLLM compiles separately, such as its sampler, because Inductor does not support
    # NPUs.
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing, because vLLM's kernels are for other hardware."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return the chip's name, such as Ascend910B1."""
        return str(torch_npu.npu.get_device_name(device_id))

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the device's memory in bytes."""
        return int(torch_npu.npu.get_device_properties(device_id).total_memory)

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Return the peak of allocated memory in bytes."""
        return float(torch_npu.npu.max_memory_allocated(device))

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch_npu.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch_npu.npu.manual_seed_all(seed)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Raise ValueError for unsupported model dtypes."""
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"NPUs run models in bfloat16, float16 or float32, not in {dtype}")

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Raise ValueError: vLLM's kernels for quantised layers are for other hardware."""
        raise ValueError(
            f"vllm-fl-ascend does not support {quant} quantization. Serve the model unquantised"
        )

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Raise ValueError: called only if no attention backend of the plan supports the model."""
        raise ValueError(
            "No attention backend supports this model on an NPU, and vLLM has none for NPUs. "
            "`vllm-fl explain attention_backend` shows why each was rejected"
            + (f" (requested: {selected_backend.name})" if selected_backend else "")
        )

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Select vLLM's first model runner, because the second is written in Triton."""
        os.environ.setdefault(RUNNER, "0")

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Disable features that are not proven on NPUs, or raise ValueError for them."""
        from vllm.config import CompilationMode, CUDAGraphMode

        model, cache = vllm_config.model_config, vllm_config.cache_config
        compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
        parallel = vllm_config.parallel_config
        if vllm_config.use_v2_model_runner:
            raise ValueError(f"vllm-fl-ascend does not support model runner V2: unset {RUNNER}")
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "vllm-fl-ascend does not support speculative decoding: vLLM's runner copies "
                "drafts on CUDA streams"
            )
        if parallel.data_parallel_size > 1 or parallel.assigned_physical_gpu_ids is not None:
            raise ValueError(
                "vllm-fl-ascend does not support data parallelism in one engine: a worker uses "
                "the NPU of its rank. Start one engine per group of NPUs, and select the NPUs "
                f"with {cls.device_control_env_var}"
            )
        if model is not None and not model.enforce_eager:
            log.info(
                "vllm-fl-ascend runs the model eagerly, without torch.compile and graphs: neither "
                "is verified on NPUs yet (set --enforce-eager to avoid this message)"
            )
            # Also set this in the model's configuration, because later steps of vLLM read it there.
            model.enforce_eager = True
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []
        scheduler.async_scheduling = False  # it copies on CUDA streams
        parallel.disable_custom_all_reduce = True
        if cache is not None and not cache.user_specified_block_size:
            cache.block_size = BLOCK_SIZE

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Without Triton, replace the only Triton kernel in vLLM's runner by PyTorch code."""
        from vllm.triton_utils import HAS_TRITON

        if HAS_TRITON:
            return
        from vllm.triton_utils.dispatcher import register_kernels

        from .slots import compute_slot_mapping

        kernel = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
        register_kernels({kernel: compute_slot_mapping})
