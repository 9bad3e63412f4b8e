"""The vendor's forms of five vLLM layers, registered by the worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from . import kernels  # noqa: F401 (defines the operators)


class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return torch.ops.acme.rms_norm(x, self.weight.data, self.variance_epsilon)
        total = x + residual
        return torch.ops.acme.rms_norm(total, self.weight.data, self.variance_epsilon), total


class AcmeSiluAndMul(SiluAndMul):
    def forward_oot(self, x: Tensor) -> Tensor:
        return torch.ops.acme.silu_and_mul(x)


class AcmeRotaryEmbedding(RotaryEmbedding):
    def forward_oot(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert self.is_neox_style and self.rotary_dim == self.head_size and key is not None
        rotate, table = torch.ops.acme.rotate, self.cos_sin_cache
        return (
            rotate(query, positions, table, self.head_size),
            rotate(key, positions, table, self.head_size),
        )


class AcmeRowParallelLinear(RowParallelLinear):
    def forward(self, input_: Tensor) -> Any:
        return super().forward(torch.ops.acme.seen(input_, "RowParallelLinear"))


class AcmeVocabParallelEmbedding(VocabParallelEmbedding):
    def forward(self, input_: Tensor) -> Tensor:
        return super().forward(torch.ops.acme.seen(input_, "VocabParallelEmbedding"))


LAYERS = {
    "RMSNorm": AcmeRMSNorm,
    "SiluAndMul": AcmeSiluAndMul,
    "RotaryEmbedding": AcmeRotaryEmbedding,
    "RowParallelLinear": AcmeRowParallelLinear,
    "VocabParallelEmbedding": AcmeVocabParallelEmbedding,
}

_registered = False


def register_layers() -> None:
    global _registered
    if not _registered:
        _registered = True
        for name, layer in LAYERS.items():
            CustomOp.register_oot(_decorated_op_cls=layer, name=name)
