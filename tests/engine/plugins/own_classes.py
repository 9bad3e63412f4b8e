"""Layers that compute vLLM's results times OWN_SCALE."""

from __future__ import annotations

import os
from typing import Any

from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

SCALE = float(os.environ.get("OWN_SCALE", "1"))


class OwnRow(RowParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, bias = super().forward(*args, **kwargs)
        return output * SCALE, bias


class OwnQKV(QKVParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, bias = super().forward(*args, **kwargs)
        return output * SCALE, bias


class OwnEmbedding(VocabParallelEmbedding):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * SCALE
