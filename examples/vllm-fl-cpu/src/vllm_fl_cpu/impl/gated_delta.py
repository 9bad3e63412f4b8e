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
"""Head sizes of the chunked kernel."""

RECURRENT_EPSILONS = (None, 1e-5, 1e-6)
"""The kernel adds 1e-5 to a squared length; for trained models 1e-6 gives the same result."""

ANY_EPSILON = 1e-6
"""Passed if nothing is normed; the kernel then ignores it."""


def gdn_gating(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (-exp(A_log) * softplus(a + dt_bias), sigmoid(b)).

    Args:
        a, b: (tokens, heads), float16 or bfloat16, any layout.
        A_log: (heads,), with a's dtype or float32.
        dt_bias: (heads,), with a's dtype.

    Returns:
        (g, beta), both (tokens, heads). g is float32; beta has b's dtype.
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
    """Compute chunks of 64 tokens as matrix products, rounding to bfloat16 before each.

    The kernel expects states as (keys, values) in a cache that it overwrites, so it gets a copy.

    Args:
        q, k: (tokens, heads, size), bfloat16, any layout; size 64 or 128.
        v: (tokens, value_heads, size), likewise.
        g, beta: (tokens, value_heads), g in float32; beta is rounded to bfloat16.
        initial_state: (sequences, value_heads, size, size), bfloat16 or float32.
        cu_seqlens: (sequences + 1,), int32 or int64.
        epsilon: added to the squared length of each q and k; None for no normalisation.

    Returns:
        (out, final_state), with the shapes and dtypes of v and initial_state.

    Raises:
        ValueError: cu_seqlens does not rise from 0 to the number of tokens.
        RuntimeError: the kernel rejects its arguments.
    """
    ends = cu_seqlens.tolist()
    # The kernel uses these numbers as indices without checking them.
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
    """Compute gates and rule in fp32.

    The kernel expects states as (keys, values) and does not support padding, so it gets a copy of
    the tokens' states.

    Args:
        q, k: (tokens, heads, key_size), float16 or bfloat16, any layout.
        v: (tokens, value_heads, value_size), likewise.
        a, b: (tokens, value_heads), with q's dtype.
        A_log: (value_heads,), with q's dtype or float32.
        dt_bias: (value_heads,), with q's dtype.
        state: (slots, value_heads, value_size, key_size), overwritten.
        state_indices: (tokens,), int32 or int64; 0 is padding.
        epsilon: added to the squared length of each q and k, 1e-6 or 1e-5; None for no
            normalisation.

    Returns:
        (out, state). `out` has v's shape and dtype, and is 0 for padding; state is the argument.

    Raises:
        ValueError: an index is negative.
        IndexError: an index is outside state.
        RuntimeError: the kernel rejects the sizes.
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
