"""The platform: fl-bare-cpu's, which names worker and attention itself."""

from __future__ import annotations

from typing import Any

from fl_bare_cpu.platform import BareCpuPlatform


class BareVendorPlatform(BareCpuPlatform):
    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        return "fl_bare_cpu.attention.BareCpuAttentionBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "bare_vendor.worker.BareVendorWorker"
        super().check_and_update_config(vllm_config)
