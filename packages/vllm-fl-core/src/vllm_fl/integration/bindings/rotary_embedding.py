"""Where vLLM runs `rotary_embedding`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...contracts.binding import Binding, Bound, LayerPlace
from ...contracts.sizes import HEAD_SIZE, HEADS, KV_HEADS, ROTARY
from ._phrases import HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _native(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    import torch
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    cache = torch.cat((cos, sin), dim=-1)
    rotated: tuple[Tensor, Tensor | None] = RotaryEmbedding.forward_static(
        position_ids, query, key, query.shape[-1], cache.shape[-1], cache, not rotary_interleaved
    )
    return rotated


def _from_positions(layer: Any, rotate: Bound) -> Bound:
    """vLLM's rope (positions, flat query, flat key) over the contract's (heads apart, cos, sin).

    cos and sin are views of the layer's one cache, the same ones at every step.
    """
    from torch.compiler import is_compiling

    tables: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)

    def forward(
        positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        nonlocal tables
        positions = positions.flatten()
        cache = layer._match_cos_sin_cache_dtype(query)
        if is_compiling():  # there views cost nothing
            cos, sin = cache.chunk(2, dim=-1)
        else:
            known, cos, sin = tables
            if known is not cache:
                cos, sin = cache.chunk(2, dim=-1)
                tables = cache, cos, sin
        heads = (positions.shape[0], -1, layer.head_size)
        try:
            q = query.view(heads)
            k = None if key is None else key.view(heads)
        except RuntimeError:  # what made them gave another layout than its contract promises
            return forward(positions, query.contiguous(), None if key is None else key.contiguous())
        q_out, k_out = rotate(q, k, cos, sin, positions, not layer.is_neox_style)
        # What was turned in place is there already.
        return (
            query if q_out is q else q_out.reshape(query.shape),
            key if key is None or k_out is k else k_out.reshape(key.shape),
        )

    return forward


BINDING = Binding(
    places=(
        LayerPlace(
            "vllm.model_executor.layers.rotary_embedding.RotaryEmbedding",
            _native,
            grants=("query", "key"),  # vLLM's own kernels write into the projections too
            adapt=_from_positions,
            subclasses=True,
        ),
    ),
    sizes=(HEADS, KV_HEADS, HEAD_SIZE, ROTARY),
    not_reached=(
        "multimodal rope (MRotaryEmbedding and its subclasses)",
        "ropes with a forward of their own: DeepSeek's, Phi-3's long, dual-chunk, Fourier, "
        "Llama 4's vision; vision encoders use ApplyRotaryEmb",
        "ropes that a fusion pass of vLLM matched (with qk-norm, or the KV-cache write), in "
        "compiled mode on CUDA",
        HW_AGNOSTIC,
    ),
)
