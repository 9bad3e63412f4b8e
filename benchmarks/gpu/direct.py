"""Run vLLM's layers directly on FlagGems, to measure its kernels without dispatch.

All forwards of RMSNorm, SiluAndMul and RotaryEmbedding are functions of FlagGems, in eager mode.
The processes of the engine are forked from a process that has called `install`.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

__all__ = ["install"]

FORWARDS = ("forward_native", "forward_cuda")


@functools.cache
def gems() -> Any:
    """Import FlagGems on first use; it must be imported after vLLM's extension."""
    import_module("vllm._C_stable_libtorch")
    return import_module("flag_gems")


def install() -> None:
    """Replace the forwards of the three layers."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    for layer, forward in ((SiluAndMul, silu), (RMSNorm, norm), (RotaryEmbedding, rope)):
        for name in FORWARDS:
            setattr(layer, name, forward)


def silu(self: Any, x: Any) -> Any:
    """x: (tokens, 2 * d)."""
    half = x.shape[-1] // 2
    return gems().silu_and_mul(x[..., :half], x[..., half:])


def norm(self: Any, x: Any, residual: Any = None) -> Any:
    """x, residual: (..., hidden)."""
    shape, weight, epsilon = self.weight.shape, self.weight.data, self.variance_epsilon
    if residual is None:
        return gems().rms_norm(x, shape, weight, epsilon)
    return gems().fused_add_rms_norm(x, residual, shape, weight, epsilon)


def rope(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
    """positions: (tokens,); query, key: (tokens, heads * head_size)."""
    cos, sin = self._match_cos_sin_cache_dtype(query).chunk(2, dim=-1)
    heads = (*positions.shape, -1, self.head_size)
    q, k = gems().apply_rotary_pos_emb(
        query.view(heads), key.view(heads), cos, sin, positions, not self.is_neox_style
    )
    return q.reshape(query.shape), k.reshape(key.shape)
