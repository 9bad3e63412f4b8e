"""Binding of `qk_norm_rope`: an operator that a compiler pass of vLLM inserts into graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, FusionTarget, OperatorTarget, Route

from ..contracts.rules import EPSILON, HEAD_SIZE, HEADS, KV_HEADS, ROTARY
from . import rms_norm
from ._phrases import names
from ._rotary import ROTATION

if TYPE_CHECKING:
    from torch import Tensor


def _apart(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    position_ids: Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Query and key after the norms and the rope, computed like vLLM's layers."""
    size = q_weight.shape[0]
    query, key = (heads * size, kv_heads * size)
    q = qkv[:, :query].reshape(-1, heads, size)
    k = qkv[:, query : query + key].reshape(-1, kv_heads, size)
    q = rms_norm.native_rms_norm(q, None, q_weight, epsilon)
    k = rms_norm.native_rms_norm(k, None, k_weight, epsilon)
    # Pass the whole table, like layers, because gathering rows first would take separate kernels.
    return _rope(position_ids, q, k, size, cos_sin_cache, not rotary_interleaved)


def _native(qkv: Tensor, *rest: Any) -> Tensor:
    """Write the results of `_apart` into the projection.

    In compiled code, this moves more than twice the bytes of the projection.
    """
    start = 0
    for heads_of in _apart(qkv, *rest):
        if heads_of is not None:
            flat = heads_of.flatten(1)
            qkv[:, start : start + flat.shape[1]] = flat
            start += flat.shape[1]
    return qkv


def _rope(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate like vLLM in compiled graphs, without the operator that its layer otherwise calls."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    # A graph may have two symbols for the number of tokens; the layer's code has only one.
    positions = positions.flatten().view(query.shape[0])
    rotary = cos_sin_cache.shape[-1]
    turned: tuple[Tensor, Tensor | None] = RotaryEmbedding.forward_static(
        positions, query, key, head_size, rotary, cos_sin_cache, is_neox
    )
    return turned


def _norms_heads(layer: Any, config: Any) -> bool:
    """Return whether a layer is a norm as wide as a head, like the norms of queries and keys."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    model = config.model_config
    fields = model.hf_text_config.to_dict().items()
    sizes = {model.get_head_size(), *(size for name, size in fields if "head_dim" in name)}
    return isinstance(layer, RMSNorm | GemmaRMSNorm) and layer.weight.shape[0] in sizes


def _value_heads(qkv: Tensor, q_weight: Tensor, heads: int, kv_heads: int) -> int:
    return qkv.shape[1] // q_weight.shape[0] - heads - kv_heads


BINDING = Binding(
    targets=(
        OperatorTarget(
            "_C::fused_qk_norm_rope",
            names(
                "qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, "
                "cos_sin_cache, is_neox, position_ids"
            ),
            Route(
                args={
                    "heads": "num_heads_q",
                    "kv_heads": "num_heads_k",
                    "epsilon": "eps",
                    "rotary_interleaved": lambda is_neox: not is_neox,
                },
                out="qkv",
                own_args={
                    "num_heads_v": _value_heads,
                    "head_dim": lambda q_weight: q_weight.shape[0],
                    "is_neox": lambda rotary_interleaved: not rotary_interleaved,
                },
            ),
            tokens="qkv",
        ),
        # The pass also finds norms with float32 weights, such as GemmaRMSNorm's in a graph (Gemma
        # 3). vLLM's kernel raises an error for such norms, so an implementation must support them.
        FusionTarget(
            "vllm.compilation.passes.fusion.qk_norm_rope_fusion.QKNormRoPEFusionPass",
            "enable_qk_norm_rope_fusion",
            parts=("rms_norm", "rotary_embedding"),
            layers=("rotary_embedding",),
            native=_native,
            apart=_apart,
            begins=_norms_heads,
        ),
    ),
    sizes=(HEADS, KV_HEADS, HEAD_SIZE, ROTARY, EPSILON),
    not_reached=(
        "eager mode, and platforms other than CUDA and ROCm, including plugin devices: no pass "
        "looks for a norm followed by a rope there",
        "norms and ropes that the pass does not find: multimodal ropes, a gate between the "
        "projections, models that norm all heads at once, head sizes other than 64, 128 and 256, "
        "and an epsilon other than 1e-5 and 1e-6",
    ),
    batch_invariant="vLLM's own norms, which it replaces",
    needs=(ROTATION,),
)
