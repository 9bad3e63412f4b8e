"""Gated delta rules and their gates, on vLLM's C++ CPU kernels."""

from __future__ import annotations

import torch

from . import implementation, kernel

__all__ = [
    "OPS",
    "chunk_gated_delta_rule",
    "gdn_gating",
    "recurrent_gated_delta_rule",
]


CHUNKED_SIZES = (64, 128)
"""Features of a head for which there is a chunked kernel."""

RECURRENT_EPSILONS = (None, 1e-5, 1e-6)
"""The kernel adds 1e-5 to a squared length; beside such of trained models 1e-6 is the same."""

ANY_EPSILON = 1e-6
"""Given where nothing is normed, and nothing reads it."""


def gdn_gating(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(-exp(A_log) * softplus(a + dt_bias), sigmoid(b)).

    Args:
        a, b: (tokens, heads), float16 or bfloat16, of any layout.
        A_log: (heads,), of a's dtype or float32.
        dt_bias: (heads,), of a's dtype.

    Returns:
        (g, beta), both (tokens, heads): g in float32, beta in b's dtype.
    """
    g, beta = kernel("fused_gdn_gating_cpu")(
        A_log.contiguous(), a.contiguous(), b.contiguous(), dt_bias.contiguous()
    )
    return g[0], beta[0]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of 64 tokens as products of matrices, rounded to bfloat16 before each.

    The kernel keeps states of keys by values, in a cache that it overwrites: here a copy.

    Args:
        q, k: (tokens, heads, size), bfloat16, of any layout; size 64 or 128.
        v: (tokens, value_heads, size), likewise.
        g, beta: (tokens, value_heads), g in float32; beta is rounded to bfloat16.
        initial_state: (sequences, value_heads, size, size), bfloat16 or float32.
        cu_seqlens: (sequences + 1,), int32 or int64.
        epsilon: None, or what the squared length of each q and k has added.

    Returns:
        (out, final_state), of the shapes and dtypes of v and initial_state.

    Raises:
        ValueError: cu_seqlens does not rise from 0 to the number of tokens.
        RuntimeError: the kernel refuses its arguments.
    """
    ends = cu_seqlens.tolist()
    # The kernel looks at none of these numbers before it follows them.
    if [0, *sorted(ends[1:-1]), len(q)] != ends:
        raise ValueError(f"cu_seqlens must rise from 0 to {len(q)}, got {ends}")
    states = initial_state.transpose(2, 3).to(
        torch.float32, copy=True, memory_format=torch.contiguous_format
    )
    out, _ = kernel("chunk_gated_delta_rule_cpu")(
        *(x.contiguous()[None] for x in (q, k, v, g, beta.to(q.dtype))),
        states,
        True,
        cu_seqlens.int(),
        False,
        epsilon is not None,
        torch.arange(len(states), dtype=torch.int32),
        epsilon or ANY_EPSILON,
    )
    return out[0], states.transpose(2, 3).to(initial_state.dtype).contiguous()


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and rule in fp32.

    The kernel keeps states of keys by values, and knows no padding: it works on copies of the
    states that the tokens name.

    Args:
        q, k: (tokens, heads, key_size), float16 or bfloat16, of any layout.
        v: (tokens, value_heads, value_size), likewise.
        a, b: (tokens, value_heads), of q's dtype.
        A_log: (value_heads,), of q's dtype or float32.
        dt_bias: (value_heads,), of q's dtype.
        state: (slots, value_heads, value_size, key_size), overwritten.
        state_indices: (tokens,), int32 or int64; 0 is padding.
        epsilon: None, or what the squared length of each q and k has added: 1e-6 or 1e-5.

    Returns:
        (out, state): out of v's shape and dtype, 0 for padding; and the same state.

    Raises:
        ValueError: an index is negative.
        IndexError: a slot that state does not have.
        RuntimeError: the kernel refuses the sizes.
    """
    rows, tokens = state_indices.long(), len(q)
    if bool((rows < 0).any()):
        raise ValueError("state_indices must not be negative")
    if not tokens:
        return v.new_empty(v.shape), state
    states = state[rows].transpose(2, 3).float().contiguous()
    out = kernel("fused_sigmoid_gating_delta_rule_update_cpu")(
        A_log.contiguous(),
        dt_bias.contiguous(),
        *(x.contiguous()[None] for x in (q, k, v)),
        a.contiguous(),
        b.contiguous(),
        states,
        torch.arange(tokens, dtype=torch.int32),
        torch.arange(tokens + 1, dtype=torch.int32),
        epsilon is not None,
    )
    real = rows != 0
    state[rows[real]] = states[real].transpose(2, 3).to(state.dtype)
    return out[:, 0].masked_fill(~real[:, None, None], 0.0), state


OPS = (
    implementation(
        gdn_gating,
        "fused_gdn_gating_cpu",
        takes=("a.dtype != torch.float32", "dt_bias.dtype == a.dtype"),
    ),
    implementation(
        chunk_gated_delta_rule,
        "chunk_gated_delta_rule_cpu",
        takes=(
            "q.dtype == torch.bfloat16",
            f"key_size == value_size and key_size in {CHUNKED_SIZES}",
        ),
    ),
    implementation(
        recurrent_gated_delta_rule,
        "fused_sigmoid_gating_delta_rule_update_cpu",
        takes=(
            "q.dtype != torch.float32",
            "dt_bias.dtype == q.dtype",
            f"epsilon in {RECURRENT_EPSILONS}",
        ),
        consumes=("state",),
    ),
)
