"""Binding of `recurrent_gated_delta_rule`: Qwen's linear attention, in decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionTarget, OperatorTarget, Route, put

from ._hybrid import CPU_EPSILON, FLA_EPSILON, LINEAR_SIZES, has_states
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor


def _one_each(tokens: int, cu_seqlens: Tensor | None, indices: Tensor | None) -> bool:
    """Return whether each token is from a different sequence: plain decode."""
    return (
        cu_seqlens is not None
        and indices is not None
        and indices.ndim == 1
        and len(cu_seqlens) - 1 == tokens <= len(indices)
    )


def _is_update(
    q: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
) -> bool:
    rows, tokens = q.shape[:2]
    return (
        rows == 1
        and scale in (None, q.shape[-1] ** -0.5)
        and initial_state is not None
        and _one_each(tokens, cu_seqlens, ssm_state_indices)
    )


def _epsilon(use_qk_l2norm_in_kernel: bool) -> float | None:
    return FLA_EPSILON if use_qk_l2norm_in_kernel else None


def _updated(results: tuple[Tensor, Tensor], initial_state: Tensor) -> tuple[Tensor, Tensor]:
    out, state = results
    put(initial_state, state)
    return out[None], initial_state


def _one_token_each(q: Tensor) -> Tensor:
    import torch

    return torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)


UPDATE = Route(
    args={
        "q": lambda q: q[0],
        "k": lambda k: k[0],
        "v": lambda v: v[0],
        "a": lambda a: a.reshape(-1, a.shape[-1]),
        "b": lambda b: b.reshape(-1, b.shape[-1]),
        "state": "initial_state",
        "state_indices": lambda q, ssm_state_indices: ssm_state_indices[: q.shape[1]],
        "epsilon": _epsilon,
    },
    constants={
        "beta": 1.0,
        "threshold": 20.0,
        "inplace_final_state": True,
        "num_accepted_tokens": None,
    },
    only=_is_update,
    results=_updated,
    own_args={
        "q": lambda q: q[None],
        "k": lambda k: k[None],
        "v": lambda v: v[None],
        "scale": lambda: None,
        "cu_seqlens": _one_token_each,
        "ssm_state_indices": lambda state_indices: state_indices,
        "use_qk_l2norm_in_kernel": lambda epsilon: epsilon is not None,
    },
    own_results=lambda results, state: (results[0][0], state),
)


def _as_packed(op: Bound) -> Bound:
    """Adapt the op to q, k and v that are adjacent in the convolution's result."""

    def function(*call: Any) -> Any:
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, indices, is_normed = call
        value_heads, value_size, key_size = initial_state.shape[1:]
        keys, odd = divmod(mixed_qkv.shape[1] - value_heads * value_size, 2)
        if odd or keys % key_size or scale != key_size**-0.5:
            return NotImplemented
        q, k, v = mixed_qkv.split((keys, keys, value_heads * value_size), dim=-1)
        q, k = (x.unflatten(-1, (-1, key_size)) for x in (q, k))
        v = v.unflatten(-1, (value_heads, value_size))
        gates = (a, b, A_log, dt_bias)
        result, state = op(q, k, v, *gates, initial_state, indices, _epsilon(is_normed))
        put((out, initial_state), (result[:, None], state))
        return out, initial_state

    return function


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import torch

    return torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)


BY_PACKED = Route(
    out="out",
    own_args={
        "mixed_qkv": _packed,
        "scale": lambda q: q.shape[-1] ** -0.5,
        "initial_state": lambda state: state,
        "out": lambda v: v.new_empty((len(v), 1, *v.shape[1:])),
        "ssm_state_indices": lambda state_indices: state_indices,
        "use_qk_l2norm_in_kernel": lambda epsilon: epsilon is not None,
    },
    own_results=lambda out, state: (out[:, 0], state),
)


def _into(op: Bound) -> Bound:
    """Adapt the op to the CPU build's operator, with states of (key_size, value_size)."""

    def kernel(*call: Any) -> Any:
        A_log, dt_bias, q, k, v, a, b, source, indices, cu_seqlens, is_normed, *softplus = call
        rows, tokens = q.shape[:2]
        if rows != 1 or softplus != [1.0, 20.0] or not _one_each(tokens, cu_seqlens, indices):
            return NotImplemented
        import torch

        rows = indices[:tokens].long()
        its = source[rows].transpose(2, 3)
        cache = its.new_empty((tokens + 1, *its.shape[1:]))  # slot 0 would be padding
        cache[1:] = its
        slots = torch.arange(1, tokens + 1, dtype=torch.int32, device=q.device)
        epsilon = CPU_EPSILON if is_normed else None
        qkv = (x[0] for x in (q, k, v))
        out, state = op(*qkv, a, b, A_log, dt_bias, cache, slots, epsilon)
        source[rows] = state[1:].transpose(2, 3)
        return out[:, None]

    return kernel


def _from(replaced: Bound) -> Bound:
    def op(*call: Any) -> tuple[Tensor, Tensor]:
        q, k, v, a, b, A_log, dt_bias, state, state_indices, *epsilon = call
        rows = state_indices.long()
        its = state[rows].transpose(2, 3).contiguous()
        at = _one_token_each(q)
        qkv = (x[None] for x in (q, k, v))
        is_normed = epsilon not in ([], [None])
        out = replaced(A_log, dt_bias, *qkv, a, b, its, at[:-1], at, is_normed, 1.0, 20.0)
        real = rows != 0
        state[rows[real]] = its[real].transpose(2, 3)
        return out[:, 0].masked_fill(~real[:, None, None], 0.0), state

    return op


_FLA = "vllm.third_party.flash_linear_attention.ops"
_QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

BINDING = Binding(
    targets=(
        FunctionTarget(
            (
                f"{_FLA}.fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update",
                f"{_FLA}.fused_sigmoid_gating_delta_rule_update",
                f"{_QWEN}.fused_sigmoid_gating_delta_rule_update",
            ),
            names(
                "A_log, a, b, dt_bias, q, k, v, beta, threshold, scale, initial_state, "
                "inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, "
                "use_qk_l2norm_in_kernel"
            ),
            UPDATE,
            grants=("state",),
        ),
        FunctionTarget(
            (
                f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
                f"{_FLA}.fused_recurrent_gated_delta_rule_packed_decode",
                f"{_QWEN}.fused_recurrent_gated_delta_rule_packed_decode",
            ),
            names(
                "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, "
                "use_qk_l2norm_in_kernel"
            ),
            _as_packed,
            BY_PACKED,
            grants=("state",),
            tokens="mixed_qkv",
        ),
        OperatorTarget(
            "_C::fused_sigmoid_gating_delta_rule_update_cpu",
            names(
                "A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, "
                "cu_seqlens, use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold"
            ),
            _into,
            _from,
            grants=("state",),
            tokens="a",  # q, k and v have a dimension before the tokens
        ),
    ),
    sizes=LINEAR_SIZES,
    not_reached=(
        "speculative decoding, with several tokens per sequence and a state after each",
        "OLMo's hybrid models, which call a function with given gates; Kimi's delta attention, "
        "another op",
        "ROCm's AITER kernels, which also split the convolution's result",
    ),
    when=has_states,
    between_graphs=True,
    formerly=("fused_recurrent_gated_delta_rule_fwd",),
)
