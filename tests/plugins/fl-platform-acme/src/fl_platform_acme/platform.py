"""vLLM's CPU platform under the out-of-tree enum, with a vendor's overrides."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

FORK = "VLLM_WORKER_MULTIPROC_METHOD"


class AcmePlatform(CpuPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"  # vLLM builds torch.device(f"{device_name}:{rank}") from it
    ray_device_key = "ACME"
    simple_compile_backend = "eager"
    opened = False
    """Set by `open`, and read as `AcmePlatform.opened`."""

    @property
    def pass_key(self) -> str:
        return "acme_passes"

    @classmethod
    def open(cls) -> None:
        """Open the device, once per process."""
        cls.opened = True

    @classmethod
    @cache
    def get_device_name(cls, device_id: int = 0) -> str:
        return "Acme A1"

    @classmethod
    def get_compile_backend(cls) -> str:
        return "fl_platform_acme.compiling.AcmeCompiler"

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return "fl_platform_acme.compiling.AcmePassManager"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "fl_platform_acme.communicator.AcmeCommunicator"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        return True

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        return "fl_platform_acme.attention.AcmeAttentionBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
        mode, backend, method = compilation.mode, compilation.backend, os.environ.get(FORK)
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "fl_platform_acme.worker.AcmeWorker"
        super().check_and_update_config(vllm_config)
        if method is not None:
            os.environ[FORK] = method  # vLLM's class sets spawn
        compilation.custom_ops = ["all"]
        if mode == CompilationMode.VLLM_COMPILE:  # that class sets Inductor
            compilation.mode, compilation.backend = mode, backend
            compilation.cudagraph_mode = CUDAGraphMode.NONE
            compilation.splitting_ops = []
            compilation.compile_sizes = []
