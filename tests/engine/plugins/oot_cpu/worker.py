"""vLLM's CPU worker without a memory pool."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm.v1.worker.cpu_worker import CPUWorker


class OotCpuWorker(CPUWorker):
    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
