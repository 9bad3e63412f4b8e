"""Binding of `rotary_embedding`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, LayerTarget, OperatorTarget, Route, put

from ..contracts.cos_sin import joint_cos_sin
from ..contracts.rules import HEAD_SIZE, HEADS, KV_HEADS, ROTARY
from ._latent import KV_RANK, ROPE_SIZE
from ._phrases import HW_AGNOSTIC
from ._rotary import LAYER_ATTRIBUTES, ROPE_TABLES, ROTATION, cos_sin_halves

if TYPE_CHECKING:
    from torch import Tensor


def _native(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute like vLLM's layers."""
    import torch
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    # Only the rows of these positions, because the whole table may have a hundred thousand rows.
    rows = torch.cat((cos[position_ids], sin[position_ids]), dim=-1)
    at = torch.arange(rows.shape[0], device=rows.device)
    rotated: tuple[Tensor, Tensor | None] = RotaryEmbedding.forward_static(
        at, query, key, query.shape[-1], rows.shape[-1], rows, not rotary_interleaved
    )
    return rotated


def _from_positions(layer: Any, rotate: Bound) -> Bound:
    """Adapt the op (separate heads, cos, sin) to vLLM's layer (positions, flat query, flat key)."""
    tables = cos_sin_halves()

    def forward(
        positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = positions.flatten()
        cos, sin = tables(layer._match_cos_sin_cache_dtype(query))
        heads = (positions.shape[0], -1, layer.head_size)
        try:
            q = query.view(heads)
            k = None if key is None else key.view(heads)
        except RuntimeError:  # a layout that the producer's contract forbids
            return forward(positions, query.contiguous(), None if key is None else key.contiguous())
        q_out, k_out = rotate(q, k, cos, sin, positions, not layer.is_neox_style)
        # Do not copy results that were rotated in place.
        return (
            query if q_out is q else q_out.reshape(query.shape),
            key if key is None or k_out is k else k_out.reshape(key.shape),
        )

    return forward


def _of_heads(layer: Any, rotate: Bound) -> Bound:
    """Adapt the op to DeepSeek's rope.

    Its query and key already have separate heads, and its table may be float32.
    """
    tables = cos_sin_halves()

    def forward(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if offsets is not None:
            positions = positions + offsets
        cos, sin = tables(layer.cos_sin_cache)
        q, k = query.flatten(0, -3), None if key is None else key.flatten(0, -3)
        q_out, k_out = rotate(q, k, cos, sin, positions.flatten(), not layer.is_neox_style)
        return q_out.view(query.shape), None if key is None else k_out.view(key.shape)

    return forward


def _by_rows(layer: Any, rotate: Bound) -> Bound:
    """Adapt the op to the rope of Ernie 4.5 and Bailing. A token's cos and sin come from three
    rows.

    The first pairs alternate between height and width, and the last pairs use the time.
    """
    section = layer.mrope_section or (0, 0, 0)
    first_of_time = getattr(layer, "spatial_size", section[0] + section[1])
    plain = _from_positions(layer, rotate)

    def forward(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        if positions.ndim == 1:
            turned: tuple[Tensor, Tensor | None] = plain(positions, query, key)
            return turned
        import torch

        cache = layer._match_cos_sin_cache_dtype(query)
        time, height, width = cache[positions].unflatten(-1, (2, -1))
        rows = time.clone()
        rows[..., :first_of_time:2] = height[..., :first_of_time:2]
        rows[..., 1:first_of_time:2] = width[..., 1:first_of_time:2]
        heads = (positions.shape[-1], -1, layer.head_size)
        q_out, k_out = rotate(
            query.reshape(heads),
            key.reshape(heads),
            *rows.flatten(-2).chunk(2, dim=-1),
            torch.arange(positions.shape[-1], device=positions.device),
            not layer.is_neox_style,
        )
        return q_out.reshape(query.shape), k_out.reshape(key.shape)

    return forward


def _of_patches(layer: Any, rotate: Bound) -> Bound:
    """Adapt the op to Llama 4's vision encoder, with a row of a complex table per patch."""
    known: Tensor | None = None
    cos_sin: tuple[Tensor, ...] = ()

    def forward(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        nonlocal known, cos_sin
        patches = query.shape[1]
        if known is not layer.cos_sin_cache or cos_sin[0].device != query.device:
            known = layer.cos_sin_cache
            table = torch.view_as_real(known.to(query.device).view(patches, -1))
            cos_sin = table.transpose(-1, -2).flatten(-2).chunk(2, dim=-1)
        at = torch.arange(patches, device=query.device).repeat(query.shape[0])
        q, k = (x.float().flatten(0, 1) for x in (query, key))
        q_out, k_out = rotate(q, k, *cos_sin, at, True)
        return q_out.view(query.shape).to(query.dtype), k_out.view(key.shape).to(key.dtype)

    return forward


def _to_operator(op: Bound) -> Bound:
    """Adapt the op (separate heads, cos, sin) to (positions, flat projections, one cache)."""
    tables = cos_sin_halves()

    def kernel(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool,
    ) -> None:
        if not positions.numel():
            return
        cos, sin = tables(cos_sin_cache)
        positions = positions.flatten()
        heads = (positions.shape[0], -1, head_size)
        q = query.reshape(heads)  # a view, if the layout allows it
        k = None if key is None else key.reshape(heads)
        q_out, k_out = op(q, k, cos, sin, positions, not is_neox)
        k_out = None if key is None else k_out.reshape(key.shape)
        put((query, key), (q_out.reshape(query.shape), k_out))

    return kernel


def _whole(cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    cache = joint_cos_sin(cos, sin)
    return torch.cat((cos, sin), dim=-1) if cache is None else cache


def _by_heads(
    turned: tuple[Tensor, Tensor | None], query: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    q, k = turned
    return q.view(query.shape), None if key is None or k is None else k.view(key.shape)


_ROPES = "vllm.model_executor.layers.rotary_embedding"

BINDING = Binding(
    targets=(
        LayerTarget(
            f"{_ROPES}.RotaryEmbedding",
            _native,
            grants=("query", "key"),  # vLLM's kernels also write into the projections
            adapt=_from_positions,
            subclasses=True,
        ),
        LayerTarget(f"{_ROPES}.DeepseekScalingRotaryEmbedding", _native, adapt=_of_heads),
        LayerTarget(
            f"{_ROPES}.ernie45_vl_rope.Ernie4_5_VLRotaryEmbedding", _native, adapt=_by_rows
        ),
        LayerTarget(f"{_ROPES}.bailing_mrope.BailingMRotaryEmbedding", _native, adapt=_by_rows),
        LayerTarget(f"{_ROPES}.Llama4VisionRotaryEmbedding", _native, adapt=_of_patches),
        OperatorTarget(
            "_C::rotary_embedding",
            ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"),
            _to_operator,
            Route(
                args={"position_ids": "positions"},
                out=("query", "key"),
                # The kernel of every build reads flat projections: views, except for odd layouts.
                own_args={
                    "query": lambda query: query.flatten(1),
                    "key": lambda key: None if key is None else key.flatten(1),
                    "head_size": lambda query: query.shape[-1],
                    "cos_sin_cache": _whole,
                    "is_neox": lambda rotary_interleaved: not rotary_interleaved,
                },
                own_results=_by_heads,
            ),
            grants=("query", "key"),
            on_cpu=True,
        ),
    ),
    sizes=(HEADS, KV_HEADS, HEAD_SIZE, ROTARY, KV_RANK, ROPE_SIZE),
    not_reached=(
        "multimodal rope (`MRotaryEmbedding`): another op, `multimodal_rotary_embedding`",
        "DeepSeek V4's rope: its models call fused kernels instead of a layer",
        "dual-chunk rope, which rotates each query five times, and Fourier rope, with separate "
        "factors for each half and each head",
        "Phi-3's long rope, which is not a `CustomOp`; vision encoders that call `ApplyRotaryEmb` "
        "or vLLM's kernel for a packed qkv buffer",
        "ropes fused by a vLLM pass (with qk-norm, or the KV-cache write), in compiled mode on "
        "CUDA",
        HW_AGNOSTIC,
    ),
    needs=(*LAYER_ATTRIBUTES, ROTATION),
    shared=ROPE_TABLES,
)
