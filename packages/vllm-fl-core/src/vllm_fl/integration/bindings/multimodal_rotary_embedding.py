"""Where vLLM runs `multimodal_rotary_embedding`."""

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
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    mrope_section: list[int],
    mrope_interleaved: bool = False,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    import torch
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
    from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

    def dealt_out(table: Tensor) -> Tensor:
        rows = table[position_ids.t()]
        if mrope_interleaved:
            dealt: Tensor = apply_interleaved_rope(rows, mrope_section)
            return dealt
        parts = rows.split(list(mrope_section), dim=-1)
        return torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)

    c, s, rotary = dealt_out(cos), dealt_out(sin), 2 * cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        turned = ApplyRotaryEmb.forward_static(x[..., :rotary], c, s, not rotary_interleaved)
        return torch.cat((turned, x[..., rotary:]), dim=-1)

    return turn(query), turn(key)


def _from_positions(layer: Any, rotate: Bound) -> Bound:
    """vLLM's rope (positions, flat query, flat key) over the contract's (heads apart, cos, sin).

    cos and sin are views of the layer's one cache, the same ones at every step.
    """
    from torch.compiler import is_compiling

    tables: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    # A layer without sections turns text alone, whose one position is that of every axis.
    section = list(layer.mrope_section or (layer.rotary_dim // 2, 0, 0))

    def forward(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal tables
        at = positions.t() if positions.ndim == 2 else positions.unsqueeze(-1).expand(-1, 3)
        cache = layer._match_cos_sin_cache_dtype(query)
        if is_compiling():  # there views cost nothing
            cos, sin = cache.chunk(2, dim=-1)
        else:
            known, cos, sin = tables
            if known is not cache:
                cos, sin = cache.chunk(2, dim=-1)
                tables = cache, cos, sin
        heads = (at.shape[0], -1, layer.head_size)
        q_out, k_out = rotate(
            query.reshape(heads),  # views, but for odd layouts
            key.reshape(heads),
            cos,
            sin,
            at,
            section,
            layer.mrope_interleaved,
            not layer.is_neox_style,
        )
        return q_out.reshape(query.shape), k_out.reshape(key.shape)

    return forward


BINDING = Binding(
    places=(
        LayerPlace(
            "vllm.model_executor.layers.rotary_embedding.MRotaryEmbedding",
            _native,
            adapt=_from_positions,
            subclasses=True,
        ),
    ),
    sizes=(HEADS, KV_HEADS, HEAD_SIZE, ROTARY),
    when=lambda config: config.model_config.uses_mrope,
    not_reached=(
        "openPangu's `MRotaryEmbeddingInterleaved`: its `forward` goes past vLLM's dispatch",
        "Hunyuan's `XDRotaryEmbedding` (vLLM 0.26 and 0.27), which has four axes",
        HW_AGNOSTIC,
    ),
)
