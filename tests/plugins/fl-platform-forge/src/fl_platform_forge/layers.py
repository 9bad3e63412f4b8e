"""Five layers of vLLM's in the vendor's form: they call what vLLM has for the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from .counting import seen


@RMSNorm.register_oot
class ForgeRMSNorm(RMSNorm):
    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self.forward_native(seen(x, "RMSNorm"), residual)


@SiluAndMul.register_oot
class ForgeSiluAndMul(SiluAndMul):
    def forward_cpu(self, x: Tensor) -> Tensor:
        return super().forward_cpu(seen(x, "SiluAndMul"))


@RotaryEmbedding.register_oot
class ForgeRotaryEmbedding(RotaryEmbedding):
    def forward_cpu(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        return super().forward_cpu(positions, seen(query, "RotaryEmbedding"), key, *args, **kwargs)


@QKVParallelLinear.register_oot
class ForgeQKVParallelLinear(QKVParallelLinear):
    def forward(self, input_: Tensor) -> Any:
        return super().forward(seen(input_, "QKVParallelLinear"))


@VocabParallelEmbedding.register_oot
class ForgeVocabParallelEmbedding(VocabParallelEmbedding):
    def forward(self, input_: Tensor) -> Tensor:
        return super().forward(seen(input_, "VocabParallelEmbedding"))
