"""Binding of `multimodal_rotary_embedding`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, LayerTarget

from ..contracts.rules import HEAD_SIZE, HEADS, KV_HEADS, ROTARY
from ._phrases import HW_AGNOSTIC
from ._rotary import LAYER_ATTRIBUTES, ROPE_TABLES, cos_sin_halves

if TYPE_CHECKING:
    from torch import Tensor


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
    """Compute like vLLM's layer, which rounds every product."""
    import torch

    half, (_time, height, width) = cos.shape[-1], mrope_section

    def dealt_out(table: Tensor) -> Tensor:
        rows = table[position_ids.t()]
        if mrope_interleaved:
            dealt = rows[0].clone()
            dealt[:, 1 : 3 * height : 3] = rows[1, :, 1 : 3 * height : 3]
            dealt[:, 2 : 3 * width : 3] = rows[2, :, 2 : 3 * width : 3]
        else:
            parts = rows.split(list(mrope_section), dim=-1)
            dealt = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        return dealt.unsqueeze(1).to(query.dtype)

    c, s = dealt_out(cos), dealt_out(sin)

    def turn(x: Tensor) -> Tensor:
        turning, rest = x[..., : 2 * half], x[..., 2 * half :]
        if rotary_interleaved:
            a, b = turning[..., ::2], turning[..., 1::2]
            turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
        else:
            a, b = turning.chunk(2, dim=-1)
            turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
        return torch.cat((turned, rest), dim=-1)

    return turn(query), turn(key)


def _by_axes(layer: Any, rotate: Bound) -> Bound:
    """Adapt the op (separate heads, cos, sin) to vLLM's layer (positions, flat query, flat key)."""
    tables = cos_sin_halves()
    # A layer without sections rotates only text, with one position for all axes.
    section = list(layer.mrope_section or (layer.rotary_dim // 2, 0, 0))

    def forward(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        at = positions.t() if positions.ndim == 2 else positions.unsqueeze(-1).expand(-1, 3)
        cos, sin = tables(layer._match_cos_sin_cache_dtype(query))
        heads = (at.shape[0], -1, layer.head_size)
        q_out, k_out = rotate(
            query.reshape(heads),  # views, except for odd layouts
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
    targets=(
        LayerTarget(
            "vllm.model_executor.layers.rotary_embedding.MRotaryEmbedding",
            _native,
            adapt=_by_axes,
            subclasses=True,
        ),
    ),
    sizes=(HEADS, KV_HEADS, HEAD_SIZE, ROTARY),
    when=lambda config: getattr(config.model_config, "uses_mrope", True),
    not_reached=(
        "openPangu's `MRotaryEmbeddingInterleaved`: its `forward` bypasses vLLM's dispatch",
        "Hunyuan's `XDRotaryEmbedding` (vLLM 0.26 and 0.27), which has four axes",
        HW_AGNOSTIC,
    ),
    needs=LAYER_ATTRIBUTES,
    shared=ROPE_TABLES,
)
