"""vLLM's grouping of layers that share a KV cache, with a log line that it was called."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder

log = init_logger("vllm.bare_cpu")


class BareCpuKVCacheConfigBuilder(DefaultKVCacheConfigBuilder):
    def get_kv_cache_groups(self, *args: Any, **kwargs: Any) -> Any:
        log.info("bare_cpu groups the layers")
        return super().get_kv_cache_groups(*args, **kwargs)
