"""vLLM's CPU attention, with counted calls."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from .counting import CALLS


class AcmeAttentionImpl(CPUAttentionBackendImpl):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLS["attention"] += 1
        return super().forward(*args, **kwargs)


class AcmeAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return AcmeAttentionImpl
