"""vLLM's CPU worker instead of AscendWorker, which only adds code about the device itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.workspace import init_workspace_manager


class EmulatedWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        init_workspace_manager(self.device)  # as AscendWorker does

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
