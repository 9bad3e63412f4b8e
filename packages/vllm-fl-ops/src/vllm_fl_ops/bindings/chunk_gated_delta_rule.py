"""Binding of `chunk_gated_delta_rule`: Qwen's linear attention, in prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, LayerTarget, OperatorTarget

from ._hybrid import FLA_EPSILON, LINEAR_SIZES, has_states
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor


def _native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    epsilon: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Call vLLM's Triton kernels, and return the state in its original dtype."""
    from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule

    if epsilon not in (None, FLA_EPSILON):
        q, k = (
            (x.float() * (x.float().pow(2).sum(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)
            for x in (q, k)
        )
    out, state = chunk_gated_delta_rule(
        *(x[None] for x in (q, k, v, g, beta)),
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=epsilon == FLA_EPSILON,
    )
    return out[0], state.to(initial_state.dtype)


def _as_layer(layer: Any, op: Bound) -> Bound:
    """Adapt the op to vLLM's layer, which has a batch dimension before the tokens, and flags."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        chunk_offsets: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: Tensor | None = None,
        aiter_prefill_metadata: object = None,
    ) -> tuple[Tensor, Tensor | None]:
        rows, tokens = q.shape[:2]
        if cu_seqlens is None:
            import torch

            cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=q.device) * tokens
        flat = (x.flatten(0, 1) for x in (q, k, v, g, beta))
        epsilon = FLA_EPSILON if use_qk_l2norm_in_kernel else None
        out, state = op(*flat, initial_state, cu_seqlens, epsilon)
        if core_attn_out is not None:
            core_attn_out.view(-1)[: out.numel()].copy_(out.flatten())
        return out.unflatten(0, (rows, tokens)), state if output_final_state else None

    return forward


def _into(op: Bound) -> Bound:
    """Adapt the op to the CPU build's operator, which overwrites (key_size, value_size) states in a
    cache."""

    def kernel(*call: Any) -> Any:
        *tensors, cache, _, cu_seqlens, head_first, is_normed, indices, epsilon = call
        if head_first or len(tensors[0]) != 1:
            return NotImplemented
        rows = indices.long()
        states = cache[rows].transpose(2, 3)
        epsilon = epsilon if is_normed else None
        out, state = op(*(x[0] for x in tensors), states, cu_seqlens, epsilon)
        cache[rows] = state.transpose(2, 3)
        return out[None], cache

    return kernel


def _from(replaced: Bound) -> Bound:
    def op(*call: Any) -> tuple[Tensor, Tensor]:
        import torch

        q, k, v, g, beta, initial_state, cu_seqlens, *rest = call
        epsilon = rest[0] if rest else None
        states = initial_state.transpose(2, 3).clone(memory_format=torch.contiguous_format)
        rows = torch.arange(len(states), dtype=torch.int32, device=states.device)
        tensors = (x[None] for x in (q, k, v, g, beta.to(q.dtype)))
        flags = (False, epsilon is not None)
        out, _ = replaced(
            *tensors, states, True, cu_seqlens.int(), *flags, rows, epsilon or FLA_EPSILON
        )
        return out[0], states.transpose(2, 3).contiguous()

    return op


BINDING = Binding(
    targets=(
        LayerTarget(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.ChunkGatedDeltaRule",
            _native,
            adapt=_as_layer,
        ),
        OperatorTarget(
            "_C::chunk_gated_delta_rule_cpu",
            names(
                "query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, "
                "head_first, use_qk_l2norm_in_kernel, initial_state_indices, eps"
            ),
            _into,
            _from,
        ),
    ),
    sizes=LINEAR_SIZES,
    not_reached=(
        "the prefill backends cutedsl and aiter_flydsl: vLLM's layer calls their own forward",
        "OLMo's hybrid models, which call vLLM's Triton function; Kimi's delta attention, another "
        "op",
    ),
    when=has_states,
    between_graphs=True,
    formerly=("chunk_gated_delta_rule_fwd",),
)
