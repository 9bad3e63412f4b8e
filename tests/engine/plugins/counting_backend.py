"""vLLM's CPU attention; every forward pass appends one byte to COUNTING_FILE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl


class CountingImpl(CPUAttentionBackendImpl):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Path(os.environ["COUNTING_FILE"]).open("ab") as file:
            file.write(b".")
        return super().forward(*args, **kwargs)


class CountingBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CountingImpl]:
        return CountingImpl


class SwappingImpl(CountingImpl):
    """Attention that swaps two heads in small batches."""

    def forward(self, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(layer, query, *args, **kwargs)
        if len(query) < 17:
            kwargs["output"][:, :2] = kwargs["output"][:, :2].flip(1)
        return result


class SwappingBackend(CountingBackend):
    @staticmethod
    def get_impl_cls() -> type[SwappingImpl]:
        return SwappingImpl


class MisnamedBackend(CountingBackend):
    @staticmethod
    def get_name() -> str:
        return "COUNTING"
