"""vLLM's worker on an NPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.workspace import init_workspace_manager

__all__ = ["AscendWorker"]


class AscendWorker(Worker):  # type: ignore[misc]
    """vLLM's GPU worker without its requirements for CUDA; the rest uses torch.accelerator.

    Overrides device initialisation, the memory pool for sleep mode, and the choice of the model
    runner, since vLLM's second runner is written in Triton.
    """

    def init_device(self) -> None:
        self.device = torch.device(current_platform.device_type, self.local_rank)
        current_platform.set_device(self.device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        torch.accelerator.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        init_workspace_manager(self.device)
        self.model_runner = self._make_model_runner()

    def _make_model_runner(self) -> Any:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        return GPUModelRunner(self.vllm_config, self.device)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
