"""vLLM's CPU worker, which also registers the vendor's layers and opens its device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from .counting import CALLS
from .layers import register_layers
from .platform import AcmePlatform


class AcmeWorker(CPUWorker):
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        register_layers()
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        current_platform.open()
        if not AcmePlatform.opened:
            raise RuntimeError("AcmePlatform.opened is not set: the platform is not the vendor's")
        super().init_device()

    def calls(self) -> dict[str, int]:
        return dict(CALLS)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
