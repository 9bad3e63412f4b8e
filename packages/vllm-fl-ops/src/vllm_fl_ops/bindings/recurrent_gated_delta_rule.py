"""Where vLLM runs `recurrent_gated_delta_rule`: Qwen's linear attention, in decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, OperatorPlace, put

from ._hybrid import (
    CPU_EPSILON,
    FLA_EPSILON,
    LINEAR_KEY_HEADS,
    LINEAR_KEY_SIZE,
    LINEAR_VALUE_HEADS,
    LINEAR_VALUE_SIZE,
    has_states,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _one_each(
    tokens: int, cu_seqlens: Tensor | None, indices: Tensor | None, accepted: object = None
) -> bool:
    """Whether each token is another sequence's: plain decode, and not speculative."""
    return (
        cu_seqlens is not None
        and indices is not None
        and indices.ndim == 1
        and accepted is None
        and len(cu_seqlens) - 1 == tokens <= len(indices)
    )


def _as_update(op: Bound) -> Bound:
    def function(
        A_log: Tensor,
        a: Tensor,
        b: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: float = 1.0,
        threshold: float = 20.0,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        inplace_final_state: bool = True,
        cu_seqlens: Tensor | None = None,
        ssm_state_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:
        rows, tokens = q.shape[:2]
        if (
            rows != 1
            or (beta, threshold) != (1.0, 20.0)
            or scale not in (None, q.shape[-1] ** -0.5)
            or initial_state is None
            or not inplace_final_state
            or ssm_state_indices is None
            or not _one_each(tokens, cu_seqlens, ssm_state_indices, num_accepted_tokens)
        ):
            return NotImplemented
        out, state = op(
            *(x[0] for x in (q, k, v)),
            *(x.reshape(-1, x.shape[-1]) for x in (a, b)),
            A_log,
            dt_bias,
            initial_state,
            ssm_state_indices[:tokens],
            FLA_EPSILON if use_qk_l2norm_in_kernel else None,
        )
        put(initial_state, state)
        return out[None], initial_state

    return function


def _by_update(own: Bound) -> Bound:
    def op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        state_indices: Tensor,
        epsilon: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        out, _ = own(
            A_log,
            a,
            b,
            dt_bias,
            *(x[None] for x in (q, k, v)),
            initial_state=state,
            cu_seqlens=torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
            ssm_state_indices=state_indices,
            use_qk_l2norm_in_kernel=epsilon is not None,
        )
        return out[0], state

    return op


def _as_packed(op: Bound) -> Bound:
    """q, k and v side by side in the convolution's result."""

    def function(
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        scale: float,
        initial_state: Tensor,
        out: Tensor,
        ssm_state_indices: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:
        value_heads, value_size, key_size = initial_state.shape[1:]
        keys, odd = divmod(mixed_qkv.shape[1] - value_heads * value_size, 2)
        if odd or keys % key_size or scale != key_size**-0.5:
            return NotImplemented
        q, k, v = mixed_qkv.split((keys, keys, value_heads * value_size), dim=-1)
        result, state = op(
            q.unflatten(-1, (-1, key_size)),
            k.unflatten(-1, (-1, key_size)),
            v.unflatten(-1, (value_heads, value_size)),
            a,
            b,
            A_log,
            dt_bias,
            initial_state,
            ssm_state_indices,
            FLA_EPSILON if use_qk_l2norm_in_kernel else None,
        )
        put((out, initial_state), (result[:, None], state))
        return out, initial_state

    return function


def _by_packed(own: Bound) -> Bound:
    def op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        state_indices: Tensor,
        epsilon: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        mixed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
        out = v.new_empty((len(v), 1, *v.shape[1:]))
        scale = q.shape[-1] ** -0.5
        own(mixed, a, b, A_log, dt_bias, scale, state, out, state_indices, epsilon is not None)
        return out[:, 0], state

    return op


def _into(op: Bound) -> Bound:
    """The CPU build's operator: states of keys by values."""

    def kernel(
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        initial_state_source: Tensor,
        initial_state_indices: Tensor,
        cu_seqlens: Tensor,
        use_qk_l2norm_in_kernel: bool,
        softplus_beta: float = 1.0,
        softplus_threshold: float = 20.0,
    ) -> Any:
        batch, tokens = q.shape[:2]
        if (
            batch != 1
            or (softplus_beta, softplus_threshold) != (1.0, 20.0)
            or not _one_each(tokens, cu_seqlens, initial_state_indices)
        ):
            return NotImplemented
        import torch

        rows = initial_state_indices[:tokens].long()
        its = initial_state_source[rows].transpose(2, 3)
        cache = its.new_empty((tokens + 1, *its.shape[1:]))  # slot 0 would be padding
        cache[1:] = its
        out, state = op(
            *(x[0] for x in (q, k, v)),
            a,
            b,
            A_log,
            dt_bias,
            cache,
            torch.arange(1, tokens + 1, dtype=torch.int32, device=q.device),
            CPU_EPSILON if use_qk_l2norm_in_kernel else None,
        )
        initial_state_source[rows] = state[1:].transpose(2, 3)
        return out[:, None]

    return kernel


def _from(replaced: Bound) -> Bound:
    def op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        state_indices: Tensor,
        epsilon: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        rows = state_indices.long()
        its = state[rows].transpose(2, 3).contiguous()
        at = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        qkv = (x[None] for x in (q, k, v))
        norms = epsilon is not None
        out = replaced(A_log, dt_bias, *qkv, a, b, its, at[:-1], at, norms, 1.0, 20.0)
        real = rows != 0
        state[rows[real]] = its[real].transpose(2, 3)
        return out[:, 0].masked_fill(~real[:, None, None], 0.0), state

    return op


_FLA = "vllm.third_party.flash_linear_attention.ops"
_QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

BINDING = Binding(
    places=(
        FunctionPlace(
            (
                f"{_FLA}.fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update",
                f"{_FLA}.fused_sigmoid_gating_delta_rule_update",
                f"{_QWEN}.fused_sigmoid_gating_delta_rule_update",
            ),
            (
                "A_log",
                "a",
                "b",
                "dt_bias",
                "q",
                "k",
                "v",
                "beta",
                "threshold",
                "scale",
                "initial_state",
                "inplace_final_state",
                "cu_seqlens",
                "ssm_state_indices",
                "num_accepted_tokens",
                "use_qk_l2norm_in_kernel",
            ),
            _as_update,
            _by_update,
            grants=("state",),
        ),
        FunctionPlace(
            (
                f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
                f"{_FLA}.fused_recurrent_gated_delta_rule_packed_decode",
                f"{_QWEN}.fused_recurrent_gated_delta_rule_packed_decode",
            ),
            (
                "mixed_qkv",
                "a",
                "b",
                "A_log",
                "dt_bias",
                "scale",
                "initial_state",
                "out",
                "ssm_state_indices",
                "use_qk_l2norm_in_kernel",
            ),
            _as_packed,
            _by_packed,
            grants=("state",),
            tokens="mixed_qkv",
        ),
        OperatorPlace(
            "_C::fused_sigmoid_gating_delta_rule_update_cpu",
            (
                "A_log",
                "dt_bias",
                "q",
                "k",
                "v",
                "a",
                "b",
                "initial_state_source",
                "initial_state_indices",
                "cu_seqlens",
                "use_qk_l2norm_in_kernel",
                "softplus_beta",
                "softplus_threshold",
            ),
            _into,
            _from,
            grants=("state",),
            tokens="a",  # q, k and v have a dimension before the tokens
        ),
    ),
    sizes=(LINEAR_KEY_HEADS, LINEAR_KEY_SIZE, LINEAR_VALUE_HEADS, LINEAR_VALUE_SIZE),
    not_reached=(
        "speculative decoding, whose sequences bring several tokens with a state after each",
        "OLMo's hybrid models, which call a function that takes the gates, and Kimi's delta "
        "attention, another op",
        "ROCm's AITER kernels, which split the convolution's result, too",
    ),
    when=has_states,
    between_graphs=True,
    formerly=("fused_recurrent_gated_delta_rule_fwd",),
)
