"""A vLLM platform for a CPU without `CpuPlatform`."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from vllm import envs
from vllm.platforms.interface import Platform, PlatformEnum

BLOCK_SIZE = 32

# This device has no caches, which every vLLM process empties at shutdown.
torch.accelerator.empty_cache = lambda: None
torch.accelerator.empty_host_cache = lambda: None


class BareCpuPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"  # for parts that vLLM compiles separately, such as its sampler

    @classmethod
    def get_compile_backend(cls) -> str:
        return "inductor"  # for models

    @classmethod
    def import_kernels(cls) -> None:
        """Compiled kernels do not exist."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "bare CPU"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        return float(psutil.Process().memory_info().rss)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        pass  # torch's generator is the only one

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return bool(envs.VLLM_USE_BREAKABLE_CUDAGRAPH)

    @classmethod
    def graph_pool_handle(cls) -> tuple[int, int]:
        return (0, 0)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 1

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        raise ValueError("The plan has no attention backend for this model")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        # The second model runner is written in Triton.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        from vllm.config import CUDAGraphMode

        cache, compilation = vllm_config.cache_config, vllm_config.compilation_config
        if not envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
            compilation.cudagraph_capture_sizes = []
        compilation.compile_sizes = []  # vLLM sets them only if there are graphs
        # Inductor's kernels for several outputs at once are for GPUs.
        compilation.inductor_compile_config["combo_kernels"] = False
        compilation.inductor_compile_config["benchmark_combo_kernel"] = False
        vllm_config.scheduler_config.async_scheduling = False  # its copies run on CUDA streams
        vllm_config.parallel_config.disable_custom_all_reduce = True
        if not cache.user_specified_block_size:
            cache.block_size = BLOCK_SIZE

    @classmethod
    def get_kv_cache_config_builder_cls(cls, vllm_config: Any) -> str:
        return "fl_bare_cpu.kv_cache.BareCpuKVCacheConfigBuilder"

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace the Triton kernels of vLLM's runner by PyTorch, since Triton is missing."""
        from vllm.triton_utils.dispatcher import register_kernels

        from .kernels import compute_slot_mapping

        kernel = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
        register_kernels({kernel: compute_slot_mapping})
